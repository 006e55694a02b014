"""Imports qtk before pytest collects a file of it, which would run a second time and register its operators twice."""

import qtk  # noqa: F401
