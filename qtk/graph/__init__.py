"""Reads and edits captured graphs: names, flow, tokens, states, insertion of quantizers."""
