"""Triton kernels for NVIDIA and AMD GPUs; imported when the first tensor on a GPU arrives."""
