"""Reference implementations of every formula, in plain torch."""
