"""Exported files in their runtimes: sessions, executed nodes, latency, and values compared with the simulation."""
