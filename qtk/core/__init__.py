"""Frozen value types: dtype, granularity, spec, encoding, site, plan."""
