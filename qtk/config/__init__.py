"""Configurations: what users write in YAML, JSON or Python, checked and frozen."""
