"""Calibrators compute encodings from the statistics that observers collect."""
