"""Shows functions of the model's code that compute a recurrence over time to tracers as one op each.

Such a function loops over time steps, or over chunks of them, and a tracer unrolls the loop: the graph grows with the
length and holds at that length alone. A function, or a method, is kept whole if

1. it takes tensors, numbers and text, writes into none of them but a state, nor into attributes of its module, and
   reads no other tensor and no module: weights of layers stay edges of the graph, and none is multiplied with in it;
2. it runs more ops at longer inputs, or is the closed form of a decay: the exponential of a cumulative sum, or a
   cumulative product; or one step of a decay: its state becomes, in place, a sum with its product by an exponential;
   where all inputs that make it longer are of one length, as the heads of an attention may be that a loop runs over,
   each turn must read what the turn before made;
3. each axis of its results is as long as one of its arguments, or always the same.

Where such functions are is seen in a run of the model; that a call is one is tried on tensors without data, at two
sizes, when a tracer comes by.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import filterfalse
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from qtk.calls.calls import Call, detached
from qtk.calls.inputs import is_free
from qtk.capture.scan_trials import (
    DECAY_SUMS,
    PRODUCTS,
    Trials,
    factors_of_sizes,
    is_deeper,
    sizes_of_results,
)
from qtk.capture.verify_prepared import RunResult, eval_outcome
from qtk.errors import OUT_OF_MEMORY
from qtk.graph.plain_attributes import is_data
from qtk.nn.scan import Scan
from qtk.operators.lookup import is_product
from qtk.operators.targets import aten_name
from qtk.torch_private import (
    MODULE_CALL,
    TorchDispatchMode,
    branches,
    is_exporting,
    length_when,
    pytree,
    storage_of,
)

PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, type(None))
"""Types of the arguments that a function may have beside tensors."""

OTHERS = sys.stdlib_module_names | {"torch", "qtk"}
"""Packages with code that is not the model's."""

torch.library.define(
    "qtk::captured_scan",
    "(Tensor[] tensors, SymInt[] lengths, SymInt[] sizes, int[] ranks, str dtypes, int index) -> Tensor[]",
)


@torch.library.impl("qtk::captured_scan", "CompositeExplicitAutograd")
@torch.library.register_fake("qtk::captured_scan")  # type: ignore[untyped-decorator]
def _scan(
    tensors: Sequence[Tensor], lengths: Sequence[int], sizes: Sequence[int], ranks: Sequence[int], dtypes: str,
    index: int,
) -> list[Tensor]:
    left = iter(sizes)
    return [tensors[0].new_empty([next(left) for _ in range(rank)], dtype=getattr(torch, dtype))
            for rank, dtype in zip(ranks, dtypes.split(), strict=True)]


SCAN = torch.ops.qtk.captured_scan.default


@contextlib.contextmanager
def scans_as_ops(functions: Sequence[FunctionType]) -> Iterator[list[Scan]]:
    """While the body traces a model, its recurrences over time call a marker op with their number in what is yielded.

    Args:
        functions: what may be recurrences, as ``run_for_loops`` finds them. Their code is exchanged in the body.
    """
    scans: list[Scan] = []
    with contextlib.ExitStack() as stack:
        for function in functions:
            stack.callback(setattr, function, "__code__", function.__code__)
            plain = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
            plain.__kwdefaults__ = function.__kwdefaults__
            if "__signature__" not in vars(function):  # a forward's says how the inputs of the graph are called
                stack.callback(vars(function).pop, "__signature__")
                vars(function)["__signature__"] = inspect.signature(function)
            function.__code__ = _code_that_calls(_Caller(function, plain, scans))
        yield scans


def _code_that_calls(caller: _Caller) -> CodeType:
    """The code of a function that passes its arguments to ``caller``; users have imported the function itself."""

    def redirected(*args: Any, **kwargs: Any) -> Any:
        caller: Any = "caller"
        return caller(*args, **kwargs)

    code = redirected.__code__
    constants: Any = tuple(caller if constant == "caller" else constant for constant in code.co_consts)
    return code.replace(co_consts=constants)


class _Caller:
    """Calls a function, or the marker op in its place if a tracer passes it what makes it a recurrence."""

    def __init__(self, function: FunctionType, plain: FunctionType, scans: list[Scan]) -> None:
        self._function, self._plain, self._scans = function, plain, scans
        self._thread = threading.get_ident()
        self._trials = Trials(plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_exporting() and threading.get_ident() == self._thread:  # others compute with it meanwhile
            own = args[:1] if args and isinstance(args[0], nn.Module) else ()
            leaves, structure = pytree.tree_flatten(((*map(_without_members, own), *args[len(own):]), kwargs))
            try:
                result = self._kept(leaves, structure) if _is_builtin(structure) else None
            except OUT_OF_MEMORY:
                raise
            except Exception:  # whatever the function raises on tensors without data, or without its module
                result = None
            if result is not None:
                return result[0]
        return self._plain(*args, **kwargs)

    def _kept(self, leaves: list[object], structure: pytree.TreeSpec) -> tuple[object] | None:
        """The result of the marker op in a tuple; ``None`` if the function is no recurrence."""
        tensors = {index: leaf for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        lengths = {index: leaf for index, leaf in enumerate(leaves) if is_free(leaf)}
        others = [leaf for index, leaf in enumerate(leaves) if index not in tensors | lengths]
        if not tensors or not all(_is_plain(each) or isinstance(each, nn.Module) for each in others):
            return None
        sizes: list[Any] = [*(size for tensor in tensors.values() for size in tensor.shape), *lengths.values()]
        tried = partial(self._trials.run, leaves, structure)
        fixed = sorted({*map(int, filterfalse(is_free, sizes))})
        free = _free(sizes)
        factors = factors_of_sizes(free, fixed, lambda factors: _runs(partial(tried, factors)))
        if factors is None:
            return None
        first, longer = tried({}), tried(factors)
        if not first.decays and longer.num_ops <= first.num_ops and not any(
            is_deeper(first, partial(tried, {}, size))  # or a number of turns is as large as some length
            and not is_deeper(first, partial(tried, {}, size, (int,))) for size in fixed
        ):
            return None
        found = sizes_of_results(first, longer, {
            (length_when(size, {}), length_when(size, factors)): size for size in reversed(sizes)
        })
        if found is None or not _made_equal(sizes, free, factors):
            return None
        made = [leaf for leaf in first.leaves if isinstance(leaf, Tensor)]
        states = [tensors[index] for index in first.written]
        storages = [storage_of(each) for each in tensors.values()]
        if any(storages.count(storage_of(state)) > 1 for state in states):
            return None  # the function reads what it writes under another name
        made += states
        found += [size for state in states for size in state.shape]
        self._scans.append(Scan(self._function, structure, leaves, (*tensors, *lengths), first.written))
        outputs = iter(SCAN(
            [*tensors.values()], [*lengths.values()], found, [each.ndim for each in made],
            " ".join(str(each.dtype).removeprefix("torch.") for each in made), len(self._scans) - 1,
        ))
        results = [next(outputs) if isinstance(leaf, Tensor) else None for leaf in first.leaves]
        for state in states:
            state.copy_(next(outputs))
        return (pytree.tree_unflatten(results, first.structure),)


def _runs(trial: Callable[[], object]) -> bool:
    try:
        trial()
    except OUT_OF_MEMORY:
        raise
    except Exception:  # whatever the function raises at other sizes, or without data
        return False
    return True


def _free(sizes: Sequence[Any]) -> dict[str, int]:
    """The free sizes, each with its value in the example; a negative one each for what is in larger terms alone."""
    terms = [size for size in sizes if is_free(size)]
    symbols = sorted({str(symbol) for size in terms for symbol in size.node.expr.free_symbols})
    plain = {str(size.node.expr): length_when(size, {}) for size in terms}
    return {symbol: plain.get(symbol, -place) for place, symbol in enumerate(symbols, 1)}


def _made_equal(sizes: Sequence[Any], free: Mapping[str, int], factors: Mapping[str, int]) -> bool:
    """Tells the tracer which free sizes are equal, or fixed, by ``factors``; ``False`` if it knows better."""
    plain = {str(size.node.expr): size for size in sizes if is_free(size)}
    first: dict[int, str] = {}
    return all(bool(plain[symbol] == (free[symbol] if factor == 1 else plain[first[factor]]))
               for symbol, factor in factors.items() if first.setdefault(factor, symbol) != symbol or factor == 1)


def _is_plain(leaf: object) -> bool:
    return isinstance(leaf, PLAIN)


def _is_builtin(structure: pytree.TreeSpec) -> bool:
    """Says whether arguments are nested in lists, tuples and dicts alone, and in no object that a call may change."""
    return structure.is_leaf() or (structure.type in pytree.BUILTIN_TYPES
                                   and all(map(_is_builtin, branches(structure))))


def _without_members(module: nn.Module) -> nn.Module:
    """A module of the same class with the plain attributes of ``module``, and none of its tensors and modules."""
    twin = nn.Module.__new__(type(module))
    plain = {name: value for name, value in vars(module).items() if not name.startswith("_") and is_data(value)}
    twin.__dict__ = vars(nn.Module()) | copy.deepcopy(plain)
    return twin


def run_for_loops(model: nn.Module, call: Call) -> tuple[RunResult, list[FunctionType]]:
    """The outcome of ``model`` in eval mode, and the functions, and methods, that may be recurrences.

    In these a loop runs ops, or they take a cumulative sum or product. The arguments are given as they are.
    """
    frames = _Frames(model)
    with frames:
        outcome = eval_outcome(model, call.args, call.kwargs)
    found = [_function_of(frame_code, names) for frame_code, names in frames.loops.items()
             if frame_code not in frames.layers]
    return outcome, [function for function in found if function is not None and not function.__closure__]


def loops_of(model: nn.Module, call: Call) -> list[FunctionType]:
    """The functions of ``run_for_loops``; none if the model does not run so."""
    try:
        return run_for_loops(model, Call(*detached((call.args, call.kwargs)), None))[1]
    except OUT_OF_MEMORY:
        raise
    except Exception:  # of the user's code; the trace will say it
        return []


def _function_of(code: CodeType, scopes: Sequence[Mapping[str, Any]]) -> FunctionType | None:
    """The function, behind its decorators, that ``code`` is of; ``None`` if it has no name in one of ``scopes``."""
    for scope in scopes:
        function = scope.get(code.co_name)
        while function is not None:
            if isinstance(function, FunctionType) and function.__code__ is code:
                return function
            function = getattr(function, "__wrapped__", None) or getattr(function, "__func__", None)
    return None


class _Frames(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the codes of the functions in whose loops ops run, and the codes that multiply with a parameter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.loops: dict[CodeType, list[Mapping[str, Any]]] = {}
        self.layers: set[CodeType] = set()
        self._static = {id(each): each for each in (*model.parameters(), *model.buffers())}
        self._last: list[tuple[FrameType, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        operands = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        static = [each for each in operands if id(each) in self._static]
        if operands and len(static) == len(operands):
            self._static |= {id(each): each for each in pytree.tree_leaves(result) if isinstance(each, Tensor)}
        frames = [(frame, frame.f_lasti) for frame in _frames()]
        for depth, ((frame, instruction), (before, last)) in enumerate(zip(frames, self._last, strict=False)):
            if frame is not before:
                break
            if instruction < last:
                self._note(frames[:depth + 1])
        self._last = frames
        name = (aten_name(func) or "").removesuffix("_")
        if name in (*DECAY_SUMS, *PRODUCTS) and result.is_floating_point():
            self._note(frames)
        if name == "copy" and frames and any(each is operands[0] for each in frames[-1][0].f_locals.values()):
            self._note(frames[-1:])
        if is_product(func) and any(each.ndim > 1 for each in static):
            self.layers |= {frame.f_code for frame, _ in frames}
        return result

    def _note(self, frames: list[tuple[FrameType, int]]) -> None:
        """Notes the codes of frames, each with the names in which its function may be found."""
        for frame, _ in frames:
            if frame.f_code not in self.loops:
                first = next(iter(frame.f_locals.values()), None) if frame.f_code.co_argcount else None
                owner = frame.f_globals.get(getattr(frame.f_code, "co_qualname", "").rpartition(".")[0])  # 3.11
                kinds = [*type(first).__mro__, *([owner] if isinstance(owner, type) else [])]
                self.loops[frame.f_code] = [frame.f_globals, *map(vars, kinds)]

    def __exit__(self, *error: Any) -> None:
        self._last = []
        super().__exit__(*error)  # type: ignore[no-untyped-call]


def _frames() -> list[FrameType]:
    """The frames of the model's code around an op, from the forward of the innermost module on; none outside of one."""
    frames: list[FrameType] = []
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not MODULE_CALL:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in OTHERS:
            frames.append(frame)
        frame = frame.f_back
    return [] if frame is None else frames[::-1]
