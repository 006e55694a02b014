"""From a module to its graph: the ladder of captures, the canonical form, and the proof that both compute the same."""
