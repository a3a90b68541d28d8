"""Sequence layers: one file for each published layer, an ``nn.Module`` from (B, L, D) to (B, L, D)."""
