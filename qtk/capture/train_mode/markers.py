"""Marker ops that protect what differs in training, and no-grad regions, from functionalization.

Functionalization removes eval-mode dropout, splits batch norm into a native form that cannot train, fixes instance norm
to its running statistics, and drops the bounds of regions without gradients. ``mark`` makes such nodes call marker ops,
which functionalization does not change; ``recover`` replaces these by modules afterwards.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, fx

from qtk.graph.flow import maker
from qtk.operators.lookup import row_of
from qtk.operators.op_table import DROPOUT as DROPOUT_ROW
from qtk.operators.op_table import ROWS
from qtk.operators.targets import aten_name, schema_arguments
from qtk.torch_private import OpOverload, is_composed, pytree, schema_of

torch.library.define("qtk::captured_dropout", "(Tensor x, float p, bool train, str kind) -> Tensor")
torch.library.define(
    "qtk::captured_batch_norm",
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor? mean, Tensor? var, bool train, float momentum, float eps, "
    "bool cudnn) -> Tensor",
)
torch.library.define(
    "qtk::captured_instance_norm",
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor? mean, Tensor? var, bool by_input, float momentum, float eps, "
    "bool cudnn) -> Tensor",
)
torch.library.define("qtk::captured_detach", "(Tensor x) -> Tensor")
torch.library.define("qtk::captured_module", "(Tensor x, str path) -> Tensor")
torch.library.define("qtk::captured_module_", "(Tensor(a!) x, str path) -> Tensor(a!)")


@torch.library.impl("qtk::captured_dropout", "CompositeExplicitAutograd")
@torch.library.register_fake("qtk::captured_dropout")  # type: ignore[untyped-decorator]
def _dropout(x: Tensor, p: float, train: bool, kind: str) -> Tensor:
    return x.clone()


@torch.library.impl("qtk::captured_batch_norm", "CompositeExplicitAutograd")
@torch.library.register_fake("qtk::captured_batch_norm")  # type: ignore[untyped-decorator]
def _batch_norm(x: Tensor, *parameters: object) -> Tensor:
    return x.clone()


@torch.library.impl("qtk::captured_instance_norm", "CompositeExplicitAutograd")
@torch.library.register_fake("qtk::captured_instance_norm")  # type: ignore[untyped-decorator]
def _instance_norm(x: Tensor, *parameters: object) -> Tensor:
    return x.clone()


@torch.library.impl("qtk::captured_detach", "CompositeExplicitAutograd")
@torch.library.register_fake("qtk::captured_detach")  # type: ignore[untyped-decorator]
def _detach(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.impl("qtk::captured_module", "CompositeExplicitAutograd")
@torch.library.register_fake("qtk::captured_module")  # type: ignore[untyped-decorator]
def _module(x: Tensor, path: str) -> Tensor:
    return x.clone()


@torch.library.impl("qtk::captured_module_", "CompositeExplicitAutograd")
@torch.library.register_fake("qtk::captured_module_")  # type: ignore[untyped-decorator]
def _writing_module(x: Tensor, path: str) -> Tensor:
    return x


DROPOUT = torch.ops.qtk.captured_dropout.default
BATCH_NORM = torch.ops.qtk.captured_batch_norm.default
INSTANCE_NORM = torch.ops.qtk.captured_instance_norm.default
DETACH = torch.ops.qtk.captured_detach.default
MODULE = torch.ops.qtk.captured_module.default
WRITING_MODULE = torch.ops.qtk.captured_module_.default
INDICES = ("index", "indices", "mask")
"""Arguments of ops that the dtype of a result does not depend on."""
TRUTHS = ("eq", "ne", "lt", "le", "gt", "ge", "not_equal", "less", "less_equal", "greater", "greater_equal",
          "logical_and", "logical_or", "logical_xor", "logical_not")
"""Ops whose results are booleans, but for ops that write over a value of another dtype."""
MEAN = 3
"""Argument of ``instance_norm`` with the running mean."""


def mark(module: fx.GraphModule) -> None:
    """Makes protected nodes call marker ops, in nested graphs too. Changes ``module``; node names stay."""
    purify(module.graph)
    for node in list(module.graph.nodes):
        name = (aten_name(node.target) or "").removesuffix("_")
        if node.target is WRITING_MODULE:
            node.target = MODULE
        elif ROWS.get(name) is DROPOUT_ROW:
            node.target = DROPOUT
            node.args = (*node.args, name)
        elif name == "batch_norm":
            node.target = BATCH_NORM
        elif name == "instance_norm" and node.args[MEAN] is not None:
            node.target = INSTANCE_NORM
        elif node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and node.args[0] is False:
            inner = module.get_submodule(str(node.args[1].target))
            assert isinstance(inner, fx.GraphModule)
            _detach_writes(inner)
            _detach_outputs(inner)
    for child in module.children():
        if isinstance(child, fx.GraphModule):
            mark(child)
    module.recompile()


def _detach_outputs(module: fx.GraphModule) -> None:
    """Detaches the outputs of a no-grad region, which functionalization inlines into the graph around it."""
    output = module.graph.output_node()
    output.args = fx.node.map_arg(
        output.args, lambda value: value if value.op == "placeholder" else _detached(value, output))


def _detach_writes(module: fx.GraphModule) -> None:
    """Detaches what a no-grad region writes over values from outside of it."""
    for node in list(module.graph.nodes):
        schema = schema_of(node.target)
        first = None if schema is None or not schema.arguments else schema.arguments[0].alias_info
        if first is not None and first.is_write and not _is_private(node):
            detached = partial(_detached, user=node)
            node.args = (node.args[0], *fx.node.map_arg(node.args[1:], detached))
            node.kwargs = fx.node.map_arg(node.kwargs, detached)


def _detached(value: fx.Node, user: fx.Node) -> fx.Node:
    """The detached value, for ``user``; the value itself if it is no tensor that can have gradients."""
    made = value.meta.get("val")
    if not isinstance(made, Tensor) or not (made.is_floating_point() or made.is_complex()):
        return value
    with user.graph.inserting_before(user):
        node = user.graph.call_function(DETACH, (value,))
    node.meta = dict(value.meta)
    return node


def purify(graph: fx.Graph) -> None:
    """Replaces in-place ops on values that nothing else sees by their out-of-place variants. Changes ``graph``."""
    for node in graph.nodes:
        twin = _twin(node)
        if twin is not None and _is_private(node):
            node.target = twin
            node.args[0].replace_all_uses_with(node, delete_user_cb=lambda user, node=node: node < user)


def _twin(node: fx.Node) -> OpOverload | None:
    """``aten.relu_.default`` → ``aten.relu.default``, if the two take the same arguments."""
    name, schema = aten_name(node.target), schema_of(node.target)
    if name is None or schema is None or not name.endswith("_"):
        return None
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    twin = getattr(packet, schema.overload_name or "default", None)
    pure = schema_of(twin)
    if not isinstance(twin, OpOverload) or pure is None:
        return None
    taken, given = ([(each.name, str(each.type)) for each in of.arguments] for of in (schema, pure))
    return twin if taken == given else None  # pow_.Scalar is x ** 2, and pow.Scalar is 2 ** x


def _is_private(node: fx.Node) -> bool:
    """Says whether ``node`` alone reads the memory that it overwrites, with the dtype of the result."""
    written = node.args[0]
    if not isinstance(written, fx.Node) or not all(map(_is_fresh, (written, *(u for u in written.users if u < node)))):
        return False
    operands = [value for name, value in schema_arguments(node).items() if name not in INDICES]
    values = [value.meta["val"] for value in pytree.tree_leaves(operands) if isinstance(value, fx.Node)]
    kinds = {value.dtype for value in values if isinstance(value, Tensor)}  # the others are sizes
    if (aten_name(node.target) or "").removesuffix("_") in TRUTHS:
        kinds.add(torch.bool)
    return kinds == {written.meta["val"].dtype}


def _is_fresh(node: fx.Node) -> bool:
    """Says whether the value shares no memory with another; ops that torch writes out as others do not say so."""
    op = maker(node)
    if op is not node and sum(other.args[1:] == node.args[1:] for other in op.users) > 1:
        return False
    row, schema = row_of(op), schema_of(op.target)
    if schema is None or any(result.alias_info is not None for result in schema.returns):
        return False
    return (row is not None and row.fresh) or not is_composed(op.target)
