"""Reference math: every formula said once, in plain torch."""
