"""Float twins of torch modules that capture would freeze or hide."""
