"""Models with islands and their simulations, made once for all tests that leave them as they are."""

import functools

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import qtk
from tests.zoo.prepared import LIVE
from tests.zoo.python import PYTHON

SIZES = (2, 3)
"""Batches that calibration sees."""


@functools.cache
def pair(name):
    """An original in eval mode and its prepared model."""
    model = PYTHON[name].model()
    return model, qtk.prepare_model(model, PYTHON[name].inputs(), modules_to_exclude=PYTHON[name].unreached)


@functools.cache
def simulated(name):
    """A calibrated simulation of it."""
    return calibrate(name, qtk.QuantSim(pair(name)[1], PYTHON[name].inputs(), config=LIVE))


def calibrate(name, sim):
    sim.compute_encodings(SIZES, forward=lambda model, size: PYTHON[name].run(model, size), progress=False)
    return sim


def equal(a: object, b: object) -> bool:
    (left, one), (right, other) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    same = [torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in zip(left, right, strict=True)]
    return one == other and all(same)


def is_inside(path: str, islands) -> bool:
    return any(f"{path}.".startswith(f"{island}.") for island in islands)


def weights(name):
    """The names of linear and convolution weights on data in islands, found in the original."""
    return {
        f"{path}.weight" for path, module in pair(name)[0].named_modules()
        if isinstance(module, (nn.Linear, nn.Conv2d)) and is_inside(path, PYTHON[name].islands)
        and not path.startswith("prompt.")  # which sees no data: its value is a constant
    }
