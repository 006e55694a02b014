"""Learned ranges, and what must be true of a training that learns them."""
