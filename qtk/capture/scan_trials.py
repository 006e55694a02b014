"""Runs functions on tensors without data, at several sizes, and sees how their work and their results grow."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import combinations
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qtk.calls.inputs import is_free
from qtk.operators.targets import aten_name
from qtk.torch_private import (
    FakeTensorMode,
    TorchDispatchMode,
    length_when,
    pytree,
    storage_of,
    version_of,
    without_modes,
)

DECAY_SUMS, PRODUCTS, EXPONENTIALS = ("cumsum",), ("cumprod",), ("exp", "exp2", "expm1")
"""Ops that add up what came before, that multiply it, and that make a factor of a sum."""

SUMS = ("add", "sub", "addcmul")
"""Ops that add to a state."""

FILLING = ("copy_", "fill_", "zero_", "index_put_", "index_copy_")
"""Ops that write what others have computed into a part of a tensor."""

MOST_EQUAL = 4
"""Free sizes of one value that are tried as equal in every combination."""


class Trial(NamedTuple):
    """What a function does with tensors of some size.

    Args:
        structure: of its result.
        leaves: the leaves of the result.
        num_ops: the number of ATen ops.
        depth: the most of them of which each reads what the op before made.
        decays: whether it computes a decay in closed form, or one step of a decay of a state.
        written: the numbers of the arguments that it writes into, each the state of such a step.
    """

    structure: pytree.TreeSpec
    leaves: list[object]
    num_ops: int
    depth: int
    decays: bool
    written: tuple[int, ...]


class Trials:
    """Runs ``function`` on tensors without data; runs it once for equal arguments, for each layer asks anew."""

    def __init__(self, function: FunctionType) -> None:
        self._function = function
        self._known: dict[str, Trial] = {}

    def run(
        self, leaves: Sequence[object], structure: pytree.TreeSpec, factors: Mapping[str, int],
        doubled: int | None = None, kinds: tuple[type, ...] = (Tensor, int),
    ) -> Trial:
        """Runs it with free sizes multiplied by ``factors``, and in ``kinds`` sizes equal to ``doubled`` by 2.

        Raises: ValueError if it writes into a tensor that is no state, or into its module; whatever it raises itself.
        """
        resized = [_resized(leaf, factors, doubled if isinstance(leaf, kinds) else None) for leaf in leaves]
        key = f"{structure} {resized}"
        if key not in self._known or any(isinstance(leaf, nn.Module) for leaf in leaves):
            self._known[key] = self._run(structure, resized)
        return self._known[key]

    def _run(self, structure: pytree.TreeSpec, leaves: list[object]) -> Trial:
        """Runs the function on tensors without data. Raises: ValueError if it writes into what is no state."""
        with without_modes(), torch.no_grad(), FakeTensorMode():
            given = [torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device) if isinstance(leaf, _Empty) else leaf
                     for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(given, structure)
            before = _attributes(given)
            with _Ops(given) as ops:
                result, of = pytree.tree_flatten(self._function(*args, **kwargs))
        written = {index: storage_of(leaf) for index, leaf in enumerate(given)
                   if isinstance(leaf, Tensor) and version_of(leaf)}
        if not {*written.values()} <= ops.steps or _attributes(given) != before:
            raise ValueError("it writes into an argument")
        if {*written.values()} & {storage_of(each) for each in result if isinstance(each, Tensor)}:
            raise ValueError("it returns the state that it writes into, of which a scan returns a copy")
        decays = ops.decays or bool(written)
        return Trial(of, result, ops.count, max(ops.depths.values(), default=0), decays, (*written,))


def factors_of_sizes(
    free: Mapping[str, int], fixed: Collection[int], runs: Callable[[Mapping[str, int]], bool]
) -> dict[str, int] | None:
    """A factor for each free size: its own, unless the function runs at some equal sizes alone.

    A tracer knows a state by sizes of its own, though its batch must be as large as the batch of the inputs, and its
    width as wide as they are.

    Args:
        free: the free sizes, and the value of each in the example.
        fixed: the sizes that do not vary.
        runs: whether the function runs with free sizes multiplied by factors.

    Returns:
        The factors, all but 1 different: a factor that sizes have in common where they must be equal, 1 where they must
        equal a fixed size, and from 2 on elsewhere. ``None`` if it runs at none of them.
    """
    own = {symbol: factor for factor, symbol in enumerate(sorted(free), 2)}
    if runs(own):
        return own
    factors = dict.fromkeys(own, 1)
    for common, value in enumerate(sorted({*free.values()}), len(own) + 2):
        equal = [symbol for symbol in own if free[symbol] == value]
        sets = (part for count in range(min(len(equal), MOST_EQUAL), 0, -1) for part in combinations(equal, count))
        some = next((part for part in sets if runs({**factors, **dict.fromkeys(part, common)})), ())
        if len(some) < len(equal) and value not in fixed:
            return None
        factors |= dict.fromkeys(some, common)
    for symbol, factor in own.items():
        if runs({**factors, symbol: factor}):
            factors[symbol] = factor
    for common in sorted({*factors.values()} - {1}):  # batches and lengths that are equal by chance
        equal = [symbol for symbol in factors if factors[symbol] == common]
        other = max(factors.values()) + 1
        parts = (part for count in range(2, len(equal) // 2 + 1) for part in combinations(equal, count))
        apart = next((part for part in parts if runs({**factors, **dict.fromkeys(part, other)})), ())
        factors |= dict.fromkeys(apart, other)
    return factors


def _attributes(leaves: Sequence[object]) -> list[str]:
    """The attributes of the modules among ``leaves``, and what is in them."""
    return [repr(vars(leaf)) for leaf in leaves if isinstance(leaf, nn.Module)]


class _Empty(NamedTuple):
    """A tensor without data."""

    shape: list[int]
    dtype: torch.dtype
    device: torch.device


def _resized(leaf: object, by: Mapping[str, int], doubled: int | None) -> object:
    """A tensor, or a length, of other sizes: free sizes times factors ``by``, sizes equal to ``doubled`` times 2."""

    def resized(size: Any) -> int:
        return 2 * size if not is_free(size) and size == doubled else length_when(size, by)

    if isinstance(leaf, Tensor):
        return _Empty([resized(size) for size in leaf.shape], leaf.dtype, leaf.device)
    return resized(leaf) if isinstance(leaf, int | torch.SymInt) and not isinstance(leaf, bool) else leaf


def is_deeper(first: Trial, trial: Callable[[], Trial]) -> bool:
    """Says whether more ops of a function wait for each other in another trial; ``False`` if it does not run."""
    try:
        return trial().depth > first.depth
    except Exception:  # as axes that must be as long as before
        return False


def sizes_of_results(first: Trial, longer: Trial, known: Mapping[tuple[int, int], Any]) -> list[Any] | None:
    """The sizes of all results, flat; ``None`` if one is neither constant nor a size of the arguments.

    Args:
        first: a trial.
        longer: another, at other sizes.
        known: the length in both trials → the size of the arguments.
    """
    if first.structure != longer.structure or not any(isinstance(leaf, Tensor) for leaf in first.leaves):
        return None
    found = []
    for a, b in zip(first.leaves, longer.leaves, strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            for pair in zip(a.shape, b.shape, strict=True):
                if pair[0] != pair[1] and pair not in known:
                    return None
                found.append(known[pair] if pair in known else pair[0])
        elif a is not None or b is not None:
            return None
    return found


class _Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the ATen ops that run, and the ops that wait for each other, and sees decays of what is ``given``."""

    def __init__(self, given: Sequence[object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count, self.decays = 0, False
        self.steps: set[int] = set()
        self._states = {id(each): storage_of(each) for each in given if isinstance(each, Tensor)}
        self._exponentials: set[int] = set()
        self._decayed: dict[int, int] = {}
        self.depths: dict[int, int] = {}
        self._sums: dict[int, Tensor] = {}
        self._held: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        result, name = func(*args, **(kwargs or {})), (aten_name(func) or "").removesuffix("_")
        if isinstance(result, Tensor) and result.is_floating_point():
            summed = any(id(leaf) in self._sums for leaf in pytree.tree_leaves((args, kwargs)))
            self.decays |= name in PRODUCTS or (summed and name in EXPONENTIALS)
            if summed or name in DECAY_SUMS:
                self._sums[id(result)] = result  # held, so that no other gets its id
            self._held.append(result)
            self._note_step(name, [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)],
                            id(result))
        self._deepen(func, pytree.tree_leaves((args, kwargs)), pytree.tree_leaves(result))
        return result

    def _note_step(self, name: str, read: Sequence[Tensor], result: int) -> None:
        """Notes a state that is multiplied by an exponential, added to, and written back into its storage."""
        pairs = [(result, each) for each in read]
        if name in EXPONENTIALS:
            self._exponentials.add(result)
        elif name == "copy":
            self.steps |= {storage for each in read[1:] if (storage := self._decayed.get(id(each))) is not None
                           and storage == storage_of(read[0])}
        elif name == "mul" and len(read) == 2:
            for state, factor in (read, read[::-1]):
                if id(state) in self._states and id(factor) in self._exponentials:
                    self._decayed[result] = self._states[id(state)]
        elif name in SUMS or len(read) == 1:
            self._decayed |= {made: self._decayed[id(each)] for made, each in pairs if id(each) in self._decayed}
        if len(read) == 1:  # a view or a cast
            self._states |= {made: self._states[id(each)] for made, each in pairs if id(each) in self._states}
            self._exponentials |= {made for made, each in pairs if id(each) in self._exponentials}

    def _deepen(self, func: Any, read: Sequence[object], made: Sequence[object]) -> None:
        """Notes how many ops each result waits for: a view as many as what it is of, for turns may fill one tensor."""
        before = {storage_of(each): each for each in read if isinstance(each, Tensor)}
        depth = max((self.depths.get(storage, 0) for storage in before), default=0)
        for each in made:
            if isinstance(each, Tensor):
                storage, writes = storage_of(each), func._schema.is_mutable
                is_step = storage not in before or (writes and aten_name(func) not in FILLING)
                if is_step or writes:
                    self.depths[storage] = depth + is_step
                    self._held.append(each)
