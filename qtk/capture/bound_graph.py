"""A captured graph as one function whose attributes are looked up, and whose weights are quantized, once.

Generated code of ``torch.fx`` searches the tree of modules for each weight and quantizer at every call, and calls each
operator by its schema: for small tensors this takes longer than what is computed. A bound graph computes the same
numbers by the same kernels, and is right as long as nobody changes the model: its mode, its quantizers, its parameters.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from qtk.capture.container_code import Leaf, Parts, parts_of
from qtk.core.dtypes import FloatDtype
from qtk.graph.captured_graph import BOUND, CapturedGraph
from qtk.graph.graphs import graphs
from qtk.nn.attention import Attention
from qtk.nn.tap import all_idle
from qtk.operators.targets import attribute
from qtk.ops.fake_quantize import fake_quantize
from qtk.ops.fake_quantize_float import fake_quantize_float
from qtk.ops.registration import NATIVE
from qtk.quantizers.quantizer import Mode, Quantizer
from qtk.torch_private import OpOverload, branches, call_structure, has_hooks, pytree, schema_of

VARIABLE = re.compile(r"\bv\d+\b")

_FAKE_QUANTIZE: Any = torch.ops.qtk.fake_quantize.default if NATIVE else fake_quantize
"""What ``fake_quantize`` computes, without its checks where no gradient is recorded."""


class Name(str):
    """A variable of the function that is written."""

    __slots__ = ()


class BoundModel:
    """A model whose graphs run bound for a time in which nobody changes it. A copy or pickle has nothing written yet.

    Args:
        model: a prepared model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._state: list[object] = []
        self._functions: dict[CapturedGraph, _Function] = {}

    def __reduce__(self) -> tuple[type[BoundModel], tuple[nn.Module]]:
        return BoundModel, (self._model,)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Runs the graphs bound while the body runs without gradients and nobody changes the model.

        What was written for an earlier time is used again, if the model is as it was; its weights are quantized anew.
        A model with hooks is left as it is: they would not be called.
        """
        modules = [*self._model.modules()]
        if any(map(has_hooks, modules)):
            yield
            return
        every = [graph for graph in graphs(self._model).values() if BOUND not in vars(graph)]
        state = self._state_now(modules)
        if [*map(id, state)] != [*map(id, self._state)]:
            self._state, self._functions = state, {}
        simulated: dict[tuple[int, int], Tensor] = {}
        try:
            for graph in every:
                vars(graph)[BOUND] = functools.partial(self._first_run, graph, simulated)
            yield
        finally:
            for graph in every:
                vars(graph).pop(BOUND, None)

    def _first_run(self, graph: CapturedGraph, simulated: dict[tuple[int, int], Tensor], *leaves: object) -> Any:
        """The first call of a graph: most graphs inside others are written into these, and never called."""
        function = self._functions.get(graph)
        if function is None:
            function = self._functions[graph] = _Writer().function(graph)
        run = vars(graph)[BOUND] = function.with_weights(simulated)
        return run(*leaves)

    def _state_now(self, modules: Sequence[nn.Module]) -> list[object]:
        """What the written functions depend on, to be compared by identity."""
        state: list[object] = [*modules, *self._model.parameters(), *self._model.buffers()]
        state += [graph.revision for graph in graphs(self._model).values()]
        for each in modules:
            if isinstance(each, Quantizer):
                state += [each.mode, each.learns_range, each.momentum, vars(each).get("forward")]
        return state


@dataclass(frozen=True, slots=True, eq=False)
class _Function:
    """A written function.

    Args:
        code: of a function that takes the leaves of a call, in the order of the placeholders, and returns what the
            graph returns.
        scope: its constants by name.
        weights: names of constants that are quantized parameters, with the quantizer and the parameter.
    """

    code: CodeType
    scope: dict[str, object]
    weights: dict[str, tuple[Quantizer, Tensor]]

    def with_weights(self, simulated: dict[tuple[int, int], Tensor]) -> Callable[..., Any]:
        """The function for one time, with constants of its own: another thread may go on with it when this time ends.

        The quantized parameters that another graph has too are ``simulated`` already, or added to it.
        """
        scope = dict(self.scope)
        for name, (quantizer, parameter) in self.weights.items():
            key = id(quantizer), id(parameter)
            if key not in simulated:
                simulated[key] = quantizer(parameter)
            scope[name] = simulated[key]
        return FunctionType(self.code, scope)


class _Writer:
    """Writes the function of a graph: a line for each operator, constants under names of their own.

    An operator that is called twice with equal arguments is called once, where nothing in the graph writes to tensors.
    """

    def __init__(self) -> None:
        self._weights: dict[str, tuple[Quantizer, Tensor]] = {}
        self._scope: dict[str, object] = {}
        self._constants: dict[object, Name] = {}
        self._lines: list[tuple[Name, str]] = []
        self._written: dict[str, Name] = {}
        self._count, self._merges = 0, True

    def function(self, graph: CapturedGraph) -> _Function:
        """The function of a graph."""
        every = [graph, *(nested for path, nested in graphs(graph).items() if path)]
        self._merges = not any(_is_write(node.target) for each in every for node in each.graph.nodes)
        inputs = [self._new_name() for _ in graph.graph.find_nodes(op="placeholder")]
        results, structure = self._write(graph, inputs), call_structure(graph.graph)
        spec = None if structure is None else structure.out_spec
        shown = self._source(results) if spec is None else self._container(spec, iter(results))
        body = [*_with_ends(self._lines, shown), f"return {shown}"]
        exec(_compiled("\n    ".join([f"def run({', '.join(inputs)}):", *body])), self._scope)
        run: FunctionType = self._scope.pop("run")  # type: ignore[assignment]
        return _Function(run.__code__, self._scope, self._weights)

    def _write(self, graph: CapturedGraph, inputs: Sequence[object]) -> Any:
        """Writes the lines of a graph. Returns: its results, with names in place of nodes."""
        names: dict[fx.Node, Any] = {}
        given = iter(inputs)
        for node in graph.graph.nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), names.__getitem__)
            match node.op:
                case "placeholder":
                    names[node] = next(given)
                case "get_attr":
                    names[node] = self._constant(attribute(graph, str(node.target)))
                case "call_function":
                    once = self._merges and isinstance(node.target, OpOverload) and (
                        torch.Tag.nondeterministic_seeded not in node.target.tags)
                    function = node.target if kwargs else _function_of(node.target)
                    names[node] = self._call(function, args, kwargs, once=once)
                case "call_module":
                    names[node] = self._module(node, graph.get_submodule(str(node.target)), args, kwargs)
                case _:
                    return args[0]
        raise AssertionError("a graph has an output")

    def _call(self, function: object, args: Sequence[Any], kwargs: Mapping[str, Any], *, once: bool) -> Name:
        """Writes a call. Returns: the name of its result."""
        passed = [*map(self._source, args), *(f"{key}={self._source(each)}" for key, each in kwargs.items())]
        expression = f"{self._constant(function)}({', '.join(passed)})"
        if once and expression in self._written:
            return self._written[expression]
        name = self._written[expression] = self._new_name()
        self._lines.append((name, expression))
        return name

    def _module(self, node: fx.Node, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
        """Writes the call of a module. Returns: the name of its result."""
        if isinstance(module, Attention) and isinstance(module.core, CapturedGraph) and not all_idle(module):
            return self._write(module.core, [*args, None])[0]
        if isinstance(module, Quantizer) and module.mode is not Mode.OBSERVE and "forward" not in vars(module):
            value = node.all_input_nodes[0]
            if module.mode is Mode.BYPASS:
                return args[0]
            if value.op == "get_attr" and module.repeatable:
                return self._weight(module, self._scope[args[0]])
            if module.scale is not None and not module.learns_range and module.momentum is None:
                block_size = list(module.spec.granularity.block_size(value.meta["val"].ndim))
                if isinstance(module.spec.dtype, FloatDtype):
                    given = (*args, module.scale, block_size, module.spec.dtype.name)
                    return self._call(fake_quantize_float, given, {}, once=False)
                codes = int(module.spec.qmin), int(module.spec.qmax)
                given = (*args, module.scale, module.zero_point, block_size, *codes)
                return self._call(_FAKE_QUANTIZE, given, {}, once=False)
        return self._call(module, args, kwargs, once=False)

    def _weight(self, quantizer: Quantizer, parameter: object) -> Name:
        """The name of a constant that is a quantized parameter."""
        assert isinstance(parameter, Tensor)
        name = Name(f"w{len(self._weights)}")
        self._weights[name] = quantizer, parameter
        return name

    def _container(self, spec: pytree.TreeSpec, leaves: Iterator[object]) -> str:
        """An expression of the leaves, nested as ``spec``."""
        if spec.is_leaf():
            return self._source(next(leaves))
        children = [self._container(each, leaves) for each in branches(spec)]
        parts = parts_of(spec)
        if parts is not None:
            return self._source(parts, children)
        unflatten = self._constant(pytree.SUPPORTED_NODES[spec.type].unflatten_fn)
        return f"{unflatten}([{', '.join(children)}], {self._constant(spec.context)})"

    def _new_name(self) -> Name:
        self._count += 1
        return Name(f"v{self._count}")

    def _constant(self, value: object) -> Name:
        """The name of a value that the function holds: one for each object, or for equal devices and dtypes."""
        key = value if isinstance(value, (torch.device, torch.dtype)) else id(value)
        if key not in self._constants:
            self._constants[key] = Name(f"c{len(self._constants)}")
            self._scope[self._constants[key]] = value
        return self._constants[key]

    def _source(self, argument: object, leaves: Sequence[str] = ()) -> str:
        """An expression of a value in which names are variables, and leaves are those with their numbers."""

        def source(value: object) -> str:
            return self._source(value, leaves)

        match argument:
            case Name():
                return argument
            case Leaf():
                return leaves[argument.number]
            case Parts():
                return f"{self._constant(Parts.make)}({self._constant(argument.kind)}, {source(argument.state)})"
            case list():
                return f"[{', '.join(map(source, argument))}]"
            case tuple() if type(argument) is tuple:
                return f"({''.join(f'{source(each)}, ' for each in argument)})"
            case dict():
                return f"{{{', '.join(f'{key!r}: {source(each)}' for key, each in argument.items())}}}"
            case slice():
                return f"slice({', '.join(map(source, (argument.start, argument.stop, argument.step)))})"
        is_literal = type(argument) in (bool, int, str, type(None)) or (
            type(argument) is float and math.isfinite(argument))
        return repr(argument) if is_literal else self._constant(argument)


@functools.lru_cache(maxsize=1024)
def _is_write(target: object) -> bool:
    schema = schema_of(target)
    return schema is not None and schema.is_mutable


@functools.lru_cache(maxsize=1024)
def _function_of(target: object) -> object:
    """What to call with positional arguments: Python's own binding of an ATen operator, which reads no schema."""
    schema = schema_of(target)
    if schema is None or not isinstance(target, OpOverload) or target.namespace != "aten" or schema.is_mutable:
        return target
    name = "size" if target is torch.ops.aten.sym_size.int else schema.name.partition("::")[2]
    for place, kind in ((torch, type(torch.add)), (Tensor, type(Tensor.add))):
        if isinstance(function := getattr(place, name, None), kind):
            return function
    return target


def _with_ends(lines: Sequence[tuple[Name, str]], returned: str) -> list[str]:
    """The lines, each followed by the end of the values that nothing reads any more."""
    seen, written = {*VARIABLE.findall(returned)}, list[str]()
    for name, expression in reversed(lines):
        last = {*VARIABLE.findall(expression)} - seen
        seen |= last
        written.append("; ".join([f"{name} = {expression}", *(f"{read} = None" for read in sorted(last))]))
    return written[::-1]


@functools.lru_cache(maxsize=64)
def _compiled(source: str) -> CodeType:
    return compile(source, "<bound graph>", "exec")
