"""The models of the zoo, captured and proved once a run of the suite for all tests that leave them as they are."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable
from typing import Any

import pytest
from torch import nn

import qtk
from tests.once import once
from tests.zoo.models import ZOO

NEVER_PICKLED = ("weight_standardised",)
"""Models with parametrizations, which torch refuses to pickle."""

LIVE = {"version": 1, "extends": "default", "fold_batch_norms": False}
"""The default target with batch norms as they are, so that a bypassed simulation is the float model bit for bit."""


@functools.cache
def pair(name: str) -> tuple[nn.Module, qtk.PreparedModel]:
    """A model in eval mode and the same prepared; they share their tensors."""
    def make() -> tuple[nn.Module, qtk.PreparedModel]:
        model = ZOO[name].model()
        return model, qtk.prepare_model(model, ZOO[name].inputs())

    return make() if name in NEVER_PICKLED else once(f"zoo-{name}", make)


def copied(name: str) -> tuple[nn.Module, qtk.PreparedModel]:
    """A copy of ``pair`` for a test that changes them; the two share their tensors."""
    return copy.deepcopy(pair(name))


def simulated(name: str, **options: Any) -> qtk.QuantSim:
    """A calibrated simulation of a copy."""
    entry = ZOO[name]
    sim = qtk.QuantSim(pair(name)[1], entry.inputs(), **options)
    sizes = (2, 3 if entry.dynamic else 2)
    sim.compute_encodings(sizes, forward=lambda model, size: entry.run(model, size), progress=False)
    return sim


def slow_but(names: Iterable[str], *quick: str) -> list[Any]:
    """Parameters of which all but some belong to slow tests."""
    names = list(names)
    assert set(quick) <= set(names)
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]
