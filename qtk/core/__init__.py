"""Frozen values every other floor speaks in."""
