"""Quantizers: the modules inserted at the sites of a graph."""
