"""ampkit: automatic mixed precision for PyTorch."""
