"""Weights from statistics: tensors in, tensors out; no graph, no module."""
