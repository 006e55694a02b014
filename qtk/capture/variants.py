"""Joins several graphs of one module, one for each kind of call: rank, dtype, with or without a mask."""

from __future__ import annotations

import torch
from torch import nn

from qtk.errors import CaptureError
from qtk.graph.captured_graph import VARIANTS, CapturedGraph


def add_variant(main: CapturedGraph, kind: str, other: CapturedGraph) -> None:
    """Makes ``main`` pass calls of ``kind`` to ``other``, another graph of the same module. Changes both.

    Afterwards both share one set of parameters, buffers, submodules and, once inserted, quantizers.

    Raises: CaptureError if they have different members of the same name; nothing has changed then.
    """
    clash = _clash(main, other, "")
    if clash is not None:
        raise CaptureError(f"graphs for several kinds of calls would each have a {clash} of their own")
    _move(main, other)
    other.adopt(main.__dict__)
    main.meta.setdefault(VARIANTS, {})[kind] = other


def _clash(main: nn.Module, other: nn.Module, path: str) -> str | None:
    """The path of the first member that has the same name in both but differs; ``None`` if there is none."""
    for table in ("_parameters", "_buffers"):
        mine, theirs = main.__dict__[table], other.__dict__[table]
        for name in mine.keys() & theirs.keys():
            a, b = mine[name], theirs[name]
            if a is not b and not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)):
                return f"{path}{name}"
    for name in main._modules.keys() & other._modules.keys():
        a, b = main._modules[name], other._modules[name]
        if a is None or b is None or a is b:
            continue
        if type(a) is type(b) is nn.Module:
            inner = _clash(a, b, f"{path}{name}.")
            if inner is not None:
                return inner
        elif repr(a) != repr(b) or any(isinstance(module, CapturedGraph) for module in (*a.modules(), *b.modules())):
            return f"{path}{name}"
    return None


def _move(main: nn.Module, other: nn.Module) -> None:
    main._non_persistent_buffers_set |= other._non_persistent_buffers_set
    for table in ("_parameters", "_buffers"):
        main.__dict__[table].update({
            name: value for name, value in other.__dict__[table].items() if name not in main.__dict__[table]
        })
    for name, child in other._modules.items():
        mine = main._modules.setdefault(name, child)
        if mine is not child and type(mine) is type(child) is nn.Module:
            _move(mine, child)
