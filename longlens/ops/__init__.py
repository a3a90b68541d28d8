"""Tensor functions: no modules, no files. Each fast path has its readable reference beside it."""
