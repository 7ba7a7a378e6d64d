"""Fused multi-tensor kernels for mixed precision. Importing this package does not import Triton."""
