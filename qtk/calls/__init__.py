"""Calls of a model: arguments, their kinds and sizes, their tokens and states."""
