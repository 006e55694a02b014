"""Kernels that are faster than the reference: C++ for the CPU, Triton for GPUs."""
