"""The lock that keeps captures of several threads apart."""

from __future__ import annotations

import threading

TRACING = threading.RLock()
"""Held while a model is traced, and while a simulation is run over data.

``torch.export`` and ``torch.fx`` patch torch for the whole process while they trace, and ``is_compiling()`` is then
true in every thread: two captures at once disturb each other, and a quantizer that runs meanwhile would not observe.
"""
