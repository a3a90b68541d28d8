"""Data without a task in particular: store, sources, generators, readers, splits and batches."""
