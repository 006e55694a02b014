"""From an exported program to the dialect every later step reads: functional ATen, real modules where modes matter."""

from __future__ import annotations

import warnings
from collections import Counter

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from qtk.graph.markers import BATCH_NORM, DROPOUT, mark
from qtk.graph.prepared_model import PreparedModel
from qtk.graph.sites import name_sites
from qtk.nn.batch_norm import BatchNorm
from qtk.nn.dropout import Dropout

CHECKS = ("_guards_fn", "_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range")


def canonicalize(program: ExportedProgram, original: nn.Module) -> tuple[PreparedModel, tuple[tuple[str, int], ...]]:
    """The prepared model of an exported ``original``, and the modules recovered in it by kind.

    Functionalizes (in-place ops become pure), gives dropout and batch norm back their train mode, drops shape guards
    and unused reads, and names every site.
    """
    mark(program.graph)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        captured = program.run_decompositions({}).module()
    assert isinstance(captured, fx.GraphModule)
    graph = captured.graph
    root = _root(captured, original)
    for node in list(graph.nodes):
        if any(name in str(node.target) for name in CHECKS):
            graph.erase_node(node)
        elif node.target is torch.ops.aten.copy.default:
            _replace_copy(node)
        elif node.op == "get_attr":
            if not node.users:
                graph.erase_node(node)
            else:
                node.meta["val"] = _shape_only(_attribute(root, str(node.target)))
    recovered = Counter(
        kind for node in list(graph.nodes) if (kind := _recover(root, node, original)) is not None
    )
    prepared = PreparedModel(root, graph)
    for registry in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
        setattr(prepared, registry, getattr(root, registry))  # GraphModule keeps what the graph reads, we keep all
    prepared.graph.eliminate_dead_code()
    prepared.recompile()
    name_sites(prepared.graph)
    return prepared, tuple(sorted(recovered.items()))


def _root(captured: fx.GraphModule, original: nn.Module) -> nn.Module:
    """Plain holders for the original's parameters and buffers, same names, same objects, same order."""
    root = nn.Module()
    for path, module in original.named_modules(remove_duplicate=False):
        if path:
            _holder(root, path)
        holder = _holder(root, path)
        for name, parameter in module._parameters.items():
            holder.register_parameter(name, parameter)
        for name, buffer in module._buffers.items():
            holder.register_buffer(name, buffer, persistent=name not in module._non_persistent_buffers_set)
    for node in captured.graph.nodes:  # constants that export lifted out of the code
        if node.op == "get_attr":
            owner, _, leaf = str(node.target).rpartition(".")
            holder = _holder(root, owner)
            if not hasattr(holder, leaf):
                value = _attribute(captured, str(node.target))
                if isinstance(value, nn.Parameter):
                    holder.register_parameter(leaf, value)
                elif isinstance(value, torch.Tensor):
                    holder.register_buffer(leaf, value, persistent=False)
                else:
                    setattr(holder, leaf, value)
    return root


def _holder(root: nn.Module, path: str) -> nn.Module:
    for name in filter(None, path.split(".")):
        child = root._modules.get(name)
        if child is None:
            child = nn.Module()
            root.add_module(name, child)
        root = child
    return root


def _recover(root: nn.Module, node: fx.Node, original: nn.Module) -> str | None:
    """Replaces a marker by a call of its module. Returns: the kind, for the report."""
    if node.target is DROPOUT:
        x, p, _, kind = node.args
        module: nn.Module = Dropout(kind, p)  # type: ignore[arg-type]
        name, arguments = "dropout", [x]
    elif node.target is BATCH_NORM:
        x, weight, bias, mean, var, by_batch, momentum, eps, _ = node.args
        owner = _original_owner(node, original)
        if isinstance(owner, nn.modules.batchnorm._BatchNorm) and owner.momentum is None:
            momentum = None
        module = BatchNorm(momentum, eps, always_batch_statistics=bool(by_batch))  # type: ignore[arg-type]
        name, arguments = "batch_norm", [x, weight, bias, mean, var, _batches_tracked(root, mean, node.graph)]
    else:
        return None
    target = _free_name(root, ".".join(filter(None, (_owner_path(node), name))))
    _holder(root, target.rpartition(".")[0]).add_module(target.rpartition(".")[2], module)
    with node.graph.inserting_before(node):
        call = node.graph.create_node("call_module", target, tuple(arguments))
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    node.graph.erase_node(node)
    return name


def _replace_copy(node: fx.Node) -> None:
    """``copy(into, value)``, left by functionalizing ``copy_``, has no gradient; it is ``value`` cast and expanded."""
    into, value = node.args
    assert isinstance(into, fx.Node)
    assert isinstance(value, fx.Node)
    target, source = node.meta["val"], value.meta["val"]
    with node.graph.inserting_before(node):
        if source.dtype != target.dtype:
            value = node.graph.call_function(torch.ops.aten._to_copy.default, (value,), {"dtype": target.dtype})
        if source.shape != target.shape:
            value = node.graph.call_function(torch.ops.aten.expand_as.default, (value, into))
    for made in (value,) if value is not node.args[1] else ():
        made.meta = dict(node.meta)
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)


def _batches_tracked(root: nn.Module, mean: object, graph: fx.Graph) -> fx.Node | None:
    """The counter that belongs to running statistics: the buffer beside the running mean."""
    if not isinstance(mean, fx.Node):
        return None
    owner = str(mean.target).rpartition(".")[0]
    if getattr(_holder(root, owner), "num_batches_tracked", None) is None:
        return None
    with graph.inserting_before(mean):
        counter = graph.get_attr(f"{owner}.num_batches_tracked" if owner else "num_batches_tracked")
    counter.meta["val"] = _shape_only(_attribute(root, str(counter.target)))
    return counter


def _owner_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [value[0].partition("@")[0] for key, value in stack.items() if not key.startswith("_empty")]
    return paths[-1] if paths else ""


def _original_owner(node: fx.Node, original: nn.Module) -> nn.Module | None:
    try:
        return original.get_submodule(_owner_path(node))
    except AttributeError:
        return None


def _free_name(root: nn.Module, path: str) -> str:
    owner, _, leaf = path.rpartition(".")
    holder, name, ordinal = _holder(root, owner), leaf, 0
    while hasattr(holder, name):
        ordinal += 1
        name = f"{leaf}_{ordinal}"
    return f"{owner}.{name}" if owner else name


def _shape_only(value: object) -> object:
    return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value


def _attribute(root: nn.Module, path: str) -> object:
    owner, _, leaf = path.rpartition(".")
    return getattr(root.get_submodule(owner), leaf)
