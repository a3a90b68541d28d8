"""Data without a task in particular: store, sources, streams, generators, readers, batches and metrics."""
