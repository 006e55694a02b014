"""Streaming statistics of tensors; what to make of them is a calibrator's business."""
