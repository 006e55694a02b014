"""Finds settings: what to try, in the order of its cost, and which of it helps."""
