"""Other people's systems and models: Ray, transformers, plain PyTorch."""
