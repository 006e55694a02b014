"""Streaming statistics of tensors, from which calibrators compute encodings."""
