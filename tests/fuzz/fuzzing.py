"""What the fuzz suites share: junk, mutations of what is valid, and the judge of what comes out."""

from __future__ import annotations

import copy
import os
import signal
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st
from torch import Tensor

import qtk
from qtk.errors import InternalError, QtkError

T = TypeVar("T")

HANGS_AFTER_S = 10
TRIED: Counter[str] = Counter()
"""Suite → inputs tried; ``raw``, ``hangs`` and ``silent`` → failures."""

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 20), st.sampled_from([-1, 2**31, 2**63, 2**64, 10**400, -(10**400)]),
    st.floats(), st.sampled_from([0.0, -0.0, 1e-45, 1e308, 2.5]), st.text(max_size=8),
    st.sampled_from(["", "*", "[", "\0", "\ud800", "conv", "0.weight", "min_max", "mse(steps=0)",
                     "int8", "../x", "per_channel"]),
)
JUNK = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


class HangError(BaseException):
    """The call has not come back in time."""


@st.composite
def mutated(draw: st.DrawFn, valid: Any, junk: st.SearchStrategy[Any] = JUNK) -> Any:
    """A tree of dicts and lists like ``valid``, with one to three places changed, upper ones as often as lower."""
    tree = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        holder = tree
        while True:
            if not isinstance(holder, (dict, list)) or not holder:
                return draw(junk)
            key = draw(st.sampled_from(list(holder) if isinstance(holder, dict) else range(len(holder))))
            below = holder[key]
            if not isinstance(below, (dict, list)) or not below or draw(st.integers(0, 2)) == 0:
                break
            holder = below
        match draw(st.sampled_from(["replace", "replace", "graft", "wrap", "delete", "double", "add"])):
            case "replace":
                holder[key] = draw(junk)
            case "graft":
                holder[key] = copy.deepcopy(draw(st.sampled_from(list(_subtrees(tree)))))
            case "wrap":
                holder[key] = draw(st.sampled_from([[below], {"a": below}, str(below)[:50], [below, below], [[]], {}]))
            case "delete":
                del holder[key]
            case "double" if isinstance(holder, list):
                holder.append(copy.deepcopy(below))
            case _ if isinstance(holder, dict):
                holder[draw(st.text(max_size=6) | st.sampled_from([str(key) + "s", "extends", "version"]))] = draw(junk)
            case _:
                holder.insert(0, draw(junk))
    return tree


def _subtrees(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (dict, list)):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield item
            yield from _subtrees(item)


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """``content`` with bits flipped, cut, or with bytes put in."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(len(changed) - 1, 0)))
        match draw(st.sampled_from(["flip", "flip", "cut", "insert"])):
            case "flip" if changed:
                changed[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del changed[at:at + draw(st.integers(1, 64))]
            case _:
                changed[at:at] = draw(st.binary(min_size=1, max_size=8))
    return bytes(changed)


def judged(suite: str, call: Callable[[], T]) -> T | None:
    """What ``call`` returns; ``None`` if it raised a QtkError. Fails on any other error, and if it hangs."""
    TRIED[suite] += 1
    try:
        with _in_time(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return call()
    except InternalError as error:
        TRIED["raw"] += 1
        raise AssertionError(f"raw: {error}\n{_short(error)}") from error
    except QtkError as error:
        if not str(error).strip():
            raise AssertionError("an error without a word") from error
        return None
    except HangError as error:
        TRIED["hangs"] += 1
        raise AssertionError(f"hangs: {_short(error)}") from error
    except Exception as error:
        TRIED["raw"] += 1
        raise AssertionError(f"raw: {type(error).__name__}: {error}\n{_short(error)}") from error


def silent(difference: str) -> None:
    """Fails: something changed, or was believed, without a word."""
    TRIED["silent"] += 1
    raise AssertionError(f"silent: {difference}")


def _short(error: BaseException) -> str:
    return "".join(traceback.format_tb(error.__traceback__)[-3:])


@contextmanager
def _in_time() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread() or os.name == "nt":
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise HangError(f"longer than {HANGS_AFTER_S} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, HANGS_AFTER_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


SHARES: dict[str, float] = {}
"""Test → its share of the examples of the profile."""


def share(part: float) -> Callable[[T], T]:
    """Gives a test that runs models fewer examples than one that reads text."""

    def noted(test: T) -> T:
        SHARES[test.__name__] = part  # type: ignore[attr-defined]
        return test

    return noted


def state(made: qtk.QuantSim) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in made.model.state_dict().items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
