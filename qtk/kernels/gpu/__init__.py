"""Triton kernels for NVIDIA and AMD GPUs; imported when a tensor on one comes along."""
