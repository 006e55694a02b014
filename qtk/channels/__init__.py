"""Which channels of a model may be scaled, and the parameters that absorb the factors."""
