"""Triton kernels (installed as `sparsemlp.kernels`). None yet: GPU tensors are computed by the PyTorch reference."""
