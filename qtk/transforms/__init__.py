"""Rewrites of weights: they find the sites, gather what they need, call the math and write the result."""
