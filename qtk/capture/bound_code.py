"""The code of a graph as one function whose attributes are looked up once.

Generated code of ``torch.fx`` searches the tree of modules for each weight and quantizer at every call, and calls each
operator by its schema: for small tensors this takes longer than what is computed. The function computes the same
numbers by the same kernels, and is right as long as the places it was read from are as they were (``Watch``).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from qtk.capture.container_code import Leaf, Parts, parts_of
from qtk.capture.watch import Watch
from qtk.core.dtypes import FloatDtype
from qtk.core.granularity import PerTokenBlock
from qtk.core.spec import QuantSpec
from qtk.graph.captured_graph import BOUND_NODES, REVISION, CapturedGraph
from qtk.graph.graphs import graphs
from qtk.nn.attention import Attention
from qtk.nn.tap import all_idle
from qtk.operators.lookup import is_random
from qtk.ops.fake_quantize import fake_quantize, with_range
from qtk.ops.fake_quantize_dynamic import fake_quantize_dynamic
from qtk.ops.fake_quantize_float import fake_quantize_float
from qtk.ops.simulate import simulate_dynamic
from qtk.public import BOUND_FILE, GRAPH_FILE
from qtk.quantizers.quantizer import Mode, Quantizer
from qtk.torch_private import CALL_ATTRIBUTES, OpOverload, branches, call_structure, pytree, schema_of

KNOWN_NAMESPACES = "aten", "qtk"
"""Namespaces whose random operators have a tag; random operators of other namespaces may lack it."""

VARIABLE = re.compile(r"\bv\d+\b")

_FORWARD, _ATTENTION = Quantizer.forward, Attention.forward


class Name(str):
    """A variable of the function that is written."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class BoundCode:
    """A written function.

    Args:
        code: of a function that takes the leaves of a call, in the order of the placeholders, and returns what the
            graph returns.
        scope: its constants by name.
        weights: names of constants that are quantized parameters, with the quantizer and the place of the parameter.
        watch: the places that it was read from.
    """

    code: CodeType
    scope: dict[str, object]
    weights: dict[str, tuple[Quantizer, Mapping[str, Tensor], str]]
    watch: Watch

    def function(self, simulated: dict[tuple[int, int], Tensor]) -> Callable[..., Any]:
        """The function, with constants of its own: another thread may go on with one made before.

        Its quantized parameters that another graph has too are ``simulated`` already, or added to it.
        """
        scope = dict(self.scope)
        for name, (quantizer, table, leaf) in self.weights.items():
            parameter = table[leaf]
            key = id(quantizer), id(parameter)
            if key not in simulated:
                simulated[key] = quantizer(parameter)
            scope[name] = simulated[key]
        return FunctionType(self.code, scope)


def bound_code(graph: CapturedGraph, *, weights_once: bool, gradients: bool) -> BoundCode | None:
    """The function of a graph; ``None`` if its code reads what is no member of a module, or a module has hooks.

    Args:
        graph: captured.
        weights_once: whether quantized parameters are constants, and equal calls of an operator one, where nothing in
            the graph writes to tensors: for a time in which nobody changes the model, or writes to a result.
        gradients: whether the function records gradients as the graph does.
    """
    writer = _Writer(weights_once, gradients)
    try:
        written = writer.code(graph)
    except LookupError:
        return None
    return written if written.watch.holds() else None


class _Writer:
    """Writes the function of a graph: a line for each operator, constants under names of their own."""

    def __init__(self, weights_once: bool, gradients: bool) -> None:
        self._weights_once, self._gradients = weights_once, gradients
        self._watch = Watch()
        self._weights: dict[str, tuple[Quantizer, Mapping[str, Tensor], str]] = {}
        self._scope: dict[str, object] = {}
        self._constants: dict[object, Name] = {}
        self._members: dict[Name, tuple[Mapping[str, Any], str]] = {}
        self._lines: list[tuple[Name, str]] = []
        self._nodes: list[fx.Node] = []
        self._names: dict[fx.Node, str] = {}
        self._written: dict[str, Name] = {}
        self._count, self._merges = 0, False

    def code(self, graph: CapturedGraph) -> BoundCode:
        """The function of a graph. Raises: LookupError if its code reads what is no member of a module."""
        every = [graph, *(nested for path, nested in graphs(graph).items() if path)]
        self._merges = self._weights_once and not any(
            _is_write(node.target) for each in every for node in each.graph.nodes)
        self._watch.add_hooks(graph)
        inputs = [self._new_name() for _ in graph.graph.find_nodes(op="placeholder")]
        results, structure = self._write(graph, inputs), call_structure(graph.graph)
        spec = None if structure is None else structure.out_spec
        shown = self._source(results) if spec is None else self._container(spec, iter(results))
        body = [*_with_ends(self._lines, shown), f"return {shown}"]
        exec(_compiled("\n    ".join([f"def run({', '.join(inputs)}):", *body])), self._scope)
        run: FunctionType = self._scope.pop("run")  # type: ignore[assignment]
        self._scope[BOUND_NODES] = self._nodes, self._names
        return BoundCode(run.__code__, self._scope, self._weights, self._watch)

    def _write(self, graph: CapturedGraph, inputs: Sequence[object]) -> Any:
        """Writes the lines of a graph. Returns: its results, with names in place of nodes.

        Raises: LookupError if calls of the graph run something else.
        """
        if not _runs_its_code(graph):
            raise LookupError("forward")
        self._watch.add(graph.meta, REVISION)
        self._watch.add_call(graph)
        names: dict[fx.Node, Any] = {}
        given = iter(inputs)
        for node in graph.graph.nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), names.__getitem__)
            match node.op:
                case "placeholder":
                    names[node] = next(given)
                case "get_attr":
                    names[node] = self._member(graph, str(node.target))
                case "call_function":
                    once = self._merges and isinstance(node.target, OpOverload) and (
                        node.target.namespace in KNOWN_NAMESPACES and not is_random(node))
                    function = node.target if kwargs else _function_of(node.target)
                    names[node] = self._call(node, self._constant(function), args, kwargs, once=once)
                case "call_module":
                    module = self._watch.module(graph, str(node.target))
                    names[node] = self._module(node, module, args, kwargs)
                case _:
                    return args[0]
            if isinstance(names[node], Name):
                self._names[node] = names[node]
        raise AssertionError("a graph has an output")

    def _call(
        self, node: fx.Node, function: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, once: bool = False
    ) -> Name:
        """Writes the call that a node is. Returns: the name of its result."""
        passed = [*map(self._source, args), *(f"{key}={self._source(each)}" for key, each in kwargs.items())]
        expression = f"{function}({', '.join(passed)})"
        if once and expression in self._written:
            return self._written[expression]
        name = self._written[expression] = self._new_name()
        self._lines.append((name, expression))
        self._nodes.append(node)
        return name

    def _module(self, node: fx.Node, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
        """Writes the call of a module. Returns: the name of its result."""
        if isinstance(module, Attention):
            self._watch.add(vars(module), "training")
            for quantizer in filter(lambda each: isinstance(each, Quantizer), module.modules()):
                self._watch.add(vars(quantizer), "mode")
            is_written = not (self._gradients or module.training or all_idle(module)) and (
                type(module).forward is _ATTENTION and "forward" not in vars(module))
            if is_written and isinstance(module.core, CapturedGraph) and _runs_its_code(module.core):
                self._watch.add_call(module)
                return self._write(cast(CapturedGraph, self._watch.module(module, "core")), [*args, None])[0]
        if isinstance(module, Quantizer):
            for name in ("mode", "_learns", "momentum"):
                self._watch.add(vars(module), name)
            self._watch.add_call(module)
            value = node.all_input_nodes[0]
            if value.op == "get_attr":
                if self._weights_once and module.repeatable and "forward" not in vars(module):
                    return self._weight(module, *self._members[args[0]])
            elif (written := self._quantizer(node, module, args)) is not None:
                return written
            return self._call(node, f"{self._constant(module)}.forward", args, kwargs)
        return self._call(node, self._constant(module), args, kwargs)

    def _quantizer(self, node: fx.Node, module: Quantizer, args: Sequence[Any]) -> object | None:
        """Writes what a quantizer computes whose range is fixed, or found in each tensor.

        Returns: its name; ``None`` of another quantizer.
        """
        if type(module).forward is not _FORWARD or "forward" in vars(module) or module.mode is Mode.OBSERVE:
            return None
        if module.mode is Mode.BYPASS:
            result: object = args[0]
            return result
        for name in ("scale", "zero_point"):
            self._watch.add(module._buffers, name)
        axes = node.all_input_nodes[0].meta["val"].ndim
        is_usual = type(module)._simulate_without_scale is Quantizer._simulate_without_scale
        if module.spec.dynamic and module.scale is None and is_usual and not self._gradients:
            return self._call(node, self._constant(_in_its_range(module.spec, axes)), args, {}, once=self._merges)
        in_blocks = isinstance(module.spec.granularity, PerTokenBlock)
        if module.scale is None or in_blocks or module.learns_range or module.momentum is not None:
            return None
        block_size = list(module.spec.granularity.block_size(axes))
        if isinstance(module.spec.dtype, FloatDtype):
            given: tuple[Any, ...] = (*args, module.scale, block_size, module.spec.dtype.name)
            return self._call(node, self._constant(fake_quantize_float), given, {})
        codes = int(module.spec.qmin), int(module.spec.qmax)
        if not self._gradients:
            bound = with_range(module.scale, module.zero_point, block_size, *codes)
            return self._call(node, self._constant(bound), args, {})
        given = (*args, module.scale, module.zero_point, block_size, *codes)
        return self._call(node, self._constant(fake_quantize), given, {})

    def _member(self, graph: nn.Module, path: str) -> Name:
        """An expression that reads a member, which may be another tensor at each call."""
        owner_path, _, leaf = path.rpartition(".")
        owner = self._watch.module(graph, owner_path)
        table = self._watch.member(owner, leaf)
        name = Name(f"{self._constant(table)}[{leaf!r}]")
        self._members[name] = table, leaf
        return name

    def _weight(self, quantizer: Quantizer, table: Mapping[str, Any], leaf: str) -> Name:
        """The name of a constant that is a quantized parameter."""
        name = Name(f"w{len(self._weights)}")
        self._weights[name] = quantizer, table, leaf
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
        """An expression of a value in which names are variables, and leaves the variables with their numbers."""

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


def _runs_its_code(graph: CapturedGraph) -> bool:
    """Says whether a call of a graph runs torch's generated code, which no library has replaced."""
    code = getattr(type(graph).forward, "__code__", None)
    return isinstance(code, CodeType) and GRAPH_FILE in code.co_filename and (
        not any(vars(graph).get(name) for name in CALL_ATTRIBUTES))


@functools.lru_cache(maxsize=1024)
def _is_write(target: object) -> bool:
    schema = schema_of(target)
    return schema is not None and schema.is_mutable


@functools.lru_cache(maxsize=1024)
def _function_of(target: object) -> object:
    """Returns what to call with positional arguments: Python's binding of an ATen operator, which reads no schema.

    Bindings take no list in which tensors are missing (``torch.index_put`` in 2.15).
    """
    schema = schema_of(target)
    if schema is None or not isinstance(target, OpOverload) or target.namespace != "aten" or schema.is_mutable:
        return target
    if any(str(argument.type) == "List[Optional[Tensor]]" for argument in schema.arguments):
        return target
    name = "size" if target is torch.ops.aten.sym_size.int else schema.name.partition("::")[2]
    for place, kind in ((torch, type(torch.add)), (Tensor, type(Tensor.add))):
        if isinstance(function := getattr(place, name, None), kind):
            return function
    return target


@functools.lru_cache(maxsize=1024)
def _in_its_range(spec: QuantSpec, axes: int) -> Callable[[Tensor], Tensor]:
    """The same function for equal specs, so that layers that read one value share its quantization."""
    if isinstance(spec.granularity, PerTokenBlock) or isinstance(spec.dtype, FloatDtype):
        return lambda x: simulate_dynamic(x, spec)
    block_size, codes, symmetric = spec.granularity.block_size(axes), (int(spec.qmin), int(spec.qmax)), spec.symmetric
    return lambda x: fake_quantize_dynamic(x, block_size, *codes, symmetric=symmetric)


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
    return compile(source, BOUND_FILE, "exec")
