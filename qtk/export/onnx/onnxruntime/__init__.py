"""Rewrites for ONNX Runtime: the forms that its integer kernels and fusions ask for; values do not change."""
