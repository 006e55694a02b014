"""All names that qtk takes from torch's private API, each with its use.

Torch does not promise to keep them: a release that moves one breaks this file and its test, and nothing else. All that
this file imports is already loaded by ``import torch``. The attributes in ``MODULE_TABLES`` may be used elsewhere by
name, because subclasses of ``nn.Module`` everywhere rely on them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from operator import attrgetter
from typing import Any
from unittest import mock  # torch has loaded it

import torch
from torch import Tensor, fx, nn
from torch._decomp import (
    decomposition_table,  # by which tracers find shapes, and what an op is made of
    register_decomposition,  # what torch.onnx.export makes of an op that it does not know
)
from torch._ops import HigherOrderOperator, OpOverload  # an op that takes graphs (``cond``); what an ATen node calls
from torch._subclasses.fake_tensor import FakeTensorMode  # shapes and dtypes of graph nodes without their data
from torch.export import ExportedProgram
from torch.fx import _pytree as fx_pytree  # how generated code takes arguments apart
from torch.fx.graph import _PyTreeCodeGen as PyTreeCodeGen  # the code of ``forward`` with nested arguments
from torch.fx.graph import _PyTreeInfo as CallStructure  # how an exported graph nests arguments and results
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase  # the base of every batch norm
from torch.nn.modules.dropout import _DropoutNd as DropoutBase  # the base of every dropout
from torch.utils import _pytree as pytree  # nested values: flattening, mapping, naming the path to a leaf
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes  # what sees every ATen op that runs

__all__ = [
    "CALL_ATTRIBUTES", "GLOBAL_HOOKS", "GRAPH_MODULE_NAMES", "HOOK_TABLES", "MODULE_CALL", "MODULE_TABLES",
    "BatchNormBase", "CallStructure", "DropoutBase", "FakeTensorMode", "HigherOrderOperator", "OpOverload",
    "TorchDispatchMode", "assert_when_run", "base_of", "below_autograd", "call_structure", "checking_sizes",
    "custom_functions", "decomposition_table", "drop_input_guards", "empty_like", "flatten_as", "function_modes",
    "fx_pytree", "graph_from_bytes", "graph_to_bytes", "has_length_hint", "has_onnx_function", "hooks",
    "hooks_on_saved_tensors_work", "in_backward", "is_composed", "is_exporting", "is_in_onnx_export", "is_traced",
    "keep_result_as", "length_hint", "length_when", "load_decomposed_ops", "onnx_translations_kept",
    "python_kernel", "pytree", "register_decomposition", "return_dict", "rnn_kernels", "rnn_parameter_names",
    "saves_result", "schema_of", "size_guards", "size_text", "storage_of", "version_of", "without_modes",
]

rnn_kernels = torch._VF
"""The fused kernels of recurrent nets and cells, on plain tensors: ``rnn_kernels.lstm``."""

base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""The tensor that another is a view of; ``None`` if that is no view."""

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""How often a tensor has been written in place."""

assert_when_run: Callable[[Tensor, str], None] = torch._assert_async
"""Raises RuntimeError where a tensor is false, also in code that was compiled or traced, when that runs."""

MODULE_TABLES = ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set")
"""Attributes in which ``nn.Module`` keeps its members."""

MODULE_CALL = nn.Module._call_impl.__code__
"""The code that runs the forward of a module, and its hooks, when the module is called."""

HOOK_TABLES = {
    "_forward_pre_hooks": "forward pre-hook", "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook", "_backward_hooks": "backward hook",
}
"""Attributes in which ``nn.Module`` keeps the hooks of its calls, and what they are called."""

CALL_ATTRIBUTES = ("forward", "_compiled_call_impl", *HOOK_TABLES)
"""Attributes that decide what a call of a module runs; the first two are the class's, unless something is put there."""

GLOBAL_HOOKS = [getattr(nn.modules.module, "_global" + name) for name in HOOK_TABLES]
"""The hooks of all modules."""

GRAPH_MODULE_NAMES = ("_graph", "_code", "_in_spec", "_out_spec")
"""Attributes of a ``fx.GraphModule`` instance, which a member of the same name would overwrite."""

function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""The number of ``TorchFunctionMode`` that are active."""

below_autograd = torch._C._AutoDispatchBelowAutograd
"""Context in which ops skip their autograd layer, where nothing needs a gradient."""


def schema_of(target: object) -> torch.FunctionSchema | None:
    """The schema of the op that a node calls; ``None`` if ``target`` is not a torch op."""
    schema = getattr(target, "_schema", None)
    return schema if isinstance(schema, torch.FunctionSchema) else None


def is_composed(op: object) -> bool:
    """Says whether torch writes ``op`` out as other ops, whose views its schema does not name."""
    return isinstance(op, OpOverload) and op.has_kernel_for_dispatch_key(
        torch._C.DispatchKey.CompositeImplicitAutograd)


def call_structure(graph: fx.Graph) -> CallStructure | None:
    """The pytree structure of inputs and outputs of the generated ``forward``; ``None`` if they are flat."""
    return getattr(graph._codegen, "pytree_info", None)


def load_decomposed_ops() -> None:
    """Registers the ops ``quantized_decomposed``, which torchao's and ExecuTorch's lowerings read."""
    importlib.import_module("torch.ao.quantization.fx._decomposed")


def branches(structure: pytree.TreeSpec) -> list[pytree.TreeSpec]:
    """The structures inside a pytree structure."""
    named = getattr(structure, "children", None)  # torch 2.11 has children_specs, which later versions warn of
    return list(named() if named is not None else structure.children_specs)


def empty_like(graph: fx.Graph) -> fx.Graph:
    """A graph without nodes whose generated ``forward`` nests arguments and results as in ``graph``."""
    empty = fx.Graph()
    empty.set_codegen(copy.deepcopy(graph._codegen))
    return empty


def return_dict(graph: fx.Graph, results: Mapping[str, fx.Node]) -> None:
    """Lets the generated ``forward`` of ``graph`` return ``results`` as a dict. In place."""
    structure = call_structure(graph)
    assert structure is not None
    _, nested = pytree.tree_flatten(dict.fromkeys(results, 0))
    graph.output_node().args = (list(results.values()),)
    graph.set_codegen(PyTreeCodeGen(structure._replace(out_spec=nested)))


def flatten_as(value: object, structure: pytree.TreeSpec) -> list[object]:
    """The leaves of ``value``, nested as ``structure``.

    Raises: TypeError, ValueError, KeyError, IndexError, AttributeError or RuntimeError if it is nested otherwise.
    """
    return list(fx_pytree.tree_flatten_spec(value, structure))


@dataclasses.dataclass(frozen=True)
class _NodeNumber:
    """A node among the arguments of another."""

    index: int


def graph_to_bytes(graph: fx.Graph, metadata: Collection[str]) -> bytes:
    """A graph without its module, with the named metadata of its nodes; fake tensors and symbolic sizes stay such.

    Raises: whatever an argument of a node raises that cannot be pickled.
    """
    from torch.fx._graph_pickler import GraphPickler, Options  # loads parts of Inductor

    numbers: dict[fx.Node, Any] = {node: _NodeNumber(index) for index, node in enumerate(graph.nodes)}
    records = []
    for node in graph.nodes:
        args, kwargs = (fx.node.map_arg(each, numbers.__getitem__) for each in (node.args, node.kwargs))
        meta = {key: value for key, value in node.meta.items() if key in metadata}
        if stack := meta.get("nn_module_stack"):  # path and type of each module; a type may be local to a function
            meta["nn_module_stack"] = {key: (path, str(kind)) for key, (path, kind) in stack.items()}
        records.append((node.op, node.target, args, kwargs, node.name, node.type, meta))
    return GraphPickler.dumps((records, graph._codegen), Options(ops_filter=None))


def graph_from_bytes(data: bytes) -> fx.Graph:
    """Inverse of ``graph_to_bytes``."""
    from torch.fx._graph_pickler import GraphPickler
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # the symbols of dynamic sizes; loads sympy

    fake_mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    content: Any = GraphPickler.loads(data, fake_mode)
    records, codegen = content
    graph, nodes = fx.Graph(), list[fx.Node]()
    for op, target, args, kwargs, name, kind, meta in records:
        args, kwargs = (
            fx.node.map_aggregate(each, lambda leaf: nodes[leaf.index] if isinstance(leaf, _NodeNumber) else leaf)
            for each in (args, kwargs)
        )
        nodes.append(graph.create_node(op, target, args, kwargs, name, kind))
        nodes[-1].meta = meta
    graph.set_codegen(codegen)
    structure = call_structure(graph)
    for spec in () if structure is None else (structure.in_spec, structure.out_spec):
        _register_dataclasses(spec)
    return graph


def _register_dataclasses(spec: pytree.TreeSpec | None) -> None:
    """Makes the dataclasses of a structure known to pytree, as capture did in the process that pickled it."""
    kind = getattr(spec, "type", None)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind not in pytree.SUPPORTED_NODES:
        torch.export.register_dataclass(kind)
    for branch in () if spec is None else branches(spec):
        _register_dataclasses(branch)


def drop_input_guards(program: ExportedProgram) -> None:
    """Removes the input guards, which torch 2.15 generates wrongly for ``**kwargs``. Changes ``program``."""
    program._guards_code = []


def size_guards(size: torch.SymInt) -> dict[str, tuple[str, ...]]:
    """The conditions under which the graph of ``size`` was traced, as Python expressions → the free sizes in them."""
    shape_env: Any = size.node.shape_env
    conditions = [shape_env.replace(guard.expr) for guard in shape_env.guards]
    return {size_text(each): tuple(sorted(map(str, each.free_symbols))) for each in conditions}


def size_text(size: Any) -> str:
    """A size, or what sympy has of one or of a condition, as Python; as sympy writes what torch cannot write."""
    from torch.utils._sympy.printers import PythonPrinter  # loads sympy

    with contextlib.suppress(NotImplementedError, AssertionError, TypeError):
        return str(PythonPrinter().doprint(size.node.expr if isinstance(size, torch.SymInt) else size))
    return str(size)


@contextlib.contextmanager
def checking_sizes(check: Callable[[], object]) -> Iterator[None]:
    """Calls ``check`` when tracers of this thread evaluate or bound a symbolic size; what it raises ends them."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # loads sympy
    thread = threading.get_ident()

    def checked(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)  # with the attributes of a cache
        def call(*args: Any, **kwargs: Any) -> Any:
            _ = threading.get_ident() == thread and check()
            return method(*args, **kwargs)

        return call

    names = ("evaluate_expr", "_maybe_evaluate_static", "bound_sympy", "replace", "simplify")
    with contextlib.ExitStack() as stack:
        for name in filter(functools.partial(hasattr, ShapeEnv), names):
            stack.enter_context(mock.patch.object(ShapeEnv, name, checked(getattr(ShapeEnv, name))))
        yield


def rnn_parameter_names(net: nn.RNNBase) -> list[list[str]]:
    """The names of weights and biases of each layer and direction, in the order of torch's kernels."""
    return [list(names) for names in net._all_weights]


@contextlib.contextmanager
def python_kernel(op: OpOverload, kernel: Callable[..., object]) -> Iterator[None]:
    """Replaces the Python kernels of ``op``, by which tracers find the shapes of its results.

    And what it is decomposed to: torch before 2.15 finds them so where a program is traced again.
    """
    kernels, decomposition = dict(op.py_kernels), decomposition_table.get(op)
    op.py_kernels.update(dict.fromkeys(kernels, kernel))
    op._dispatch_cache.clear()
    if decomposition is not None:
        decomposition_table[op] = kernel
    try:
        yield
    finally:
        op.py_kernels.update(kernels)
        op._dispatch_cache.clear()
        if decomposition is not None:
            decomposition_table[op] = decomposition


def storage_of(tensor: Tensor) -> int:
    """A number of the memory that ``tensor`` is in, also of one without data, as long as some tensor in it is held."""
    return int(tensor.untyped_storage()._cdata)


def hooks(module: nn.Module) -> set[Callable[..., object]]:
    """The hooks that run before or after the forward or backward of ``module``, without hooks of all modules."""
    return {hook for table in HOOK_TABLES for hook in getattr(module, table).values()}


def length_hint(length: int | torch.SymInt) -> int:
    """A length of the example inputs: of a dynamic axis without fixing it, which ``int()`` would do."""
    return length if isinstance(length, int) else int(str(length.node.hint))


def length_when(length: int | torch.SymInt, factors: Mapping[str, int]) -> int:
    """A length of the example inputs with the free sizes that ``factors`` names multiplied by these."""
    if isinstance(length, int):
        return length
    node: Any = length.node
    hints = getattr(node.shape_env, "backed_var_to_val", None) or node.shape_env.var_to_val
    return int(node.expr.xreplace({size: hints[size] * factors.get(str(size), 1) for size in node.expr.free_symbols}))


def has_length_hint(length: int | torch.SymInt) -> bool:
    """Says whether a length is known of the example inputs, not decided by data as a length after ``nonzero``."""
    return isinstance(length, int) or bool(length.node.has_hint())


def is_exporting() -> bool:
    """Says whether ``torch.export`` is tracing; torch 2.11's public function is true of ``torch.compile`` too."""
    return bool(torch.compiler._is_exporting_flag)


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Lets ops run as if no tracer and no other mode saw them."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


def is_in_onnx_export() -> bool:
    """``torch.onnx.is_in_onnx_export`` without importing the exporter, which needs packages that are an extra."""
    return "torch.onnx._internal.exporter._core" in sys.modules and torch.onnx.is_in_onnx_export()


@contextlib.contextmanager
def onnx_translations_kept() -> Iterator[None]:
    """Lets ``torch.onnx.export`` reuse its registry of translations, which each call otherwise parses from source.

    Operators are listed once too, not once a namespace. Does nothing with a torch that has moved one of the names.
    """
    registry, tools = _onnx_registry(), sys.modules.get("torch._export.utils")
    from_torchlib = getattr(registry, "__dict__", {}).get("from_torchlib")
    list_operators = getattr(tools, "_materialize_cpp_cia_ops", None)
    if not isinstance(from_torchlib, classmethod) or list_operators is None:
        yield
        return
    kept = functools.partial(_onnx_translations, from_torchlib.__func__)
    with (
        mock.patch.object(registry, "from_torchlib", staticmethod(lambda **opset: _copied(kept(**opset)))),
        mock.patch.object(tools, "_materialize_cpp_cia_ops", functools.cache(list_operators)),
    ):
        yield


def _onnx_registry() -> Any:
    with contextlib.suppress(ImportError, AttributeError):
        return importlib.import_module("torch.onnx._internal.exporter._registration").ONNXRegistry
    return None


@functools.cache
def _onnx_translations(from_torchlib: Callable[..., object], **opset: int) -> Any:
    return from_torchlib(_onnx_registry(), **opset)


def _copied(registry: Any) -> Any:
    """A registry that takes more translations without the first one taking them."""
    copied = copy.copy(registry)
    copied.functions = {op: list(found) for op, found in registry.functions.items()}
    return copied


def has_onnx_function(op: object, opset: int, *, is_complex: bool) -> bool:
    """Says whether ``torch.onnx`` translates ``op``, of complex numbers or real ones; true if its registry moved."""
    registry = _onnx_registry()
    return registry is None or any(
        each.is_complex is is_complex for each in registry.from_torchlib(opset_version=opset).get_decomps(op))


def is_traced() -> bool:
    """Says whether a tracer, a dispatch mode or a function transform (make_fx, jit, vmap) is active."""
    return torch._C._len_torch_dispatch_stack() > 0 or (
        torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None)


def hooks_on_saved_tensors_work() -> bool:
    """Says whether nobody has switched them off; checkpointing needs them."""
    return bool(torch._C._autograd._saved_tensors_hooks_is_enabled())  # type: ignore[attr-defined]


def in_backward() -> bool:
    """Says whether this thread computes a backward pass."""
    return torch._C._current_graph_task_id() != -1


def saves_result(x: Tensor) -> bool:
    """Says whether the op that made ``x`` keeps it for its own gradient."""
    return hasattr(x.grad_fn, "_raw_saved_result")


def keep_result_as(x: Tensor, rebuild: Callable[[], Tensor]) -> None:
    """Lets the op that made ``x`` keep nothing of it but a way to rebuild what its gradient reads.

    Nothing happens where it is not safe: hooks of others (checkpointing, offloading) keep the result, or it has been
    written in place, of which autograd will tell.
    """
    node: Any = x.grad_fn
    if version_of(x) == 0:  # reading what is saved would run the hooks of others, and a checkpoint again
        with contextlib.suppress(RuntimeError):
            node._raw_saved_result.register_hooks(lambda _: None, lambda _: rebuild())


def custom_functions(output: Tensor) -> Iterator[type[torch.autograd.Function]]:
    """The ``torch.autograd.Function`` classes in the autograd graph behind ``output``."""
    seen, pending = set(), [output.grad_fn]
    while pending:
        if (node := pending.pop()) is None or node in seen:
            continue
        seen.add(node)
        pending += [source for source, _ in node.next_functions]
        if (function := getattr(node, "_forward_cls", None)) is not None:
            yield function
