"""Rewrites that keep the function of a model, each proved."""
