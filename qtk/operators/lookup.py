"""Looks up the row of the op that a node calls; the call decides where an op does several things."""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch import fx

from qtk.nn.attention import Attention
from qtk.nn.batch_norm import batch_norm
from qtk.nn.channel_clamp import ChannelClamp
from qtk.nn.channel_scale import ChannelScale
from qtk.nn.dropout import Dropout
from qtk.nn.instance_norm import InstanceNorm
from qtk.nn.kept_batch_norm import kept_batch_norm
from qtk.nn.recurrent import Recurrent, RecurrentCell
from qtk.nn.scale_shift import ScaleShift
from qtk.nn.scan import Scan
from qtk.nn.train_only import train_only
from qtk.operators.op_row import OpRow
from qtk.operators.op_table import CHANNEL_SCALE, COMPUTE, DROPOUT, MOVEMENT, RECURRENT, ROWS, SCAN
from qtk.operators.targets import aten_name, called_module
from qtk.torch_private import schema_of


def op_name(node: fx.Node) -> str:
    """The op a node calls, for reports: ``aten.lstm.input``, or the module's class for a call_module."""
    if node.op == "call_module":
        return type(called_module(node)).__name__
    return str(node.target)


def row_of(node: fx.Node) -> OpRow | None:
    """The row of the op that a node calls; ``None`` if the op has no row, or the node calls no op."""
    if node.op == "call_module":
        module = called_module(node)
        if isinstance(module, (Recurrent, RecurrentCell)):
            return RECURRENT[module.kind.partition("_")[0]]
        return next((OF_MODULES[kind] for kind in type(module).__mro__ if kind in OF_MODULES), None)
    if node.op != "call_function":
        return None
    schema = schema_of(node.target)
    if schema is None:
        return OF_FUNCTIONS.get(node.target)
    name = schema.name.removeprefix("aten::")
    if name in ("constant_pad_nd", "pad", "_pad_packed_sequence") and _fill_value(node):
        return PAD_WITH_VALUE
    if name == "group_norm" and node.args[1] == 1:
        return ONE_GROUP_NORM
    if name == "pow" and isinstance(exponent := node.args[1], (int, float)):
        return POWERS[exponent < 1 and exponent % 1 != 0, exponent < 0]
    return ROWS.get(f"{name}.{schema.overload_name or 'default'}") or ROWS.get(name)


def is_elementwise(node: fx.Node) -> bool:
    """Says whether an op computes each element of its result from the elements there of its operands."""
    packet = getattr(node.target, "overloadpacket", None)
    return packet is not None and (packet in UNTAGGED or any(
        torch.Tag.pointwise in getattr(packet, name).tags for name in packet.overloads()))


def is_random(node: fx.Node) -> bool:
    """Says whether an op draws numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_product(function: object) -> bool:
    """Says whether an op, such as ``torch.ops.aten.linear.default``, is a matrix product or a convolution."""
    name = aten_name(function)
    row = None if name is None else ROWS.get(name)
    return row is not None and row.product is not None


UNTAGGED = (torch.ops.aten.floor_divide, torch.ops.aten.__and__, torch.ops.aten.__or__)
"""Element-wise operators that torch does not tag as such."""

GETITEM = OpRow("getitem", MOVEMENT, inputs=(0,))

OF_FUNCTIONS: dict[object, OpRow] = {
    operator.getitem: GETITEM, batch_norm: ROWS["batch_norm"], kept_batch_norm: ROWS["batch_norm"], train_only: DROPOUT
}
"""Functions in Python that graphs call → their rows."""

OF_MODULES: dict[type, OpRow] = {
    ChannelClamp: ROWS["qtk::channel_clamp"], ScaleShift: ROWS["qtk::scale_shift"], Dropout: ROWS["dropout"],
    InstanceNorm: ROWS["instance_norm"], ChannelScale: CHANNEL_SCALE, Scan: SCAN,
    Attention: ROWS["scaled_dot_product_attention"],
}
"""Classes of modules that graphs call → their rows, but of recurrent layers, which are of several kinds."""

ONE_GROUP_NORM = replace(ROWS["group_norm"], family="layer_norm")
"""A group norm over all channels: a layer norm, by which transformers on images normalize their tokens."""

POWERS = {
    (is_root, divides): replace(ROWS["pow"], family="root" if is_root else None, divisors=(0,) if divides else ())
    for is_root in (False, True) for divides in (False, True)
}
"""Whether the exponent is a fraction below 1, whether it is negative → the row of the power."""

PAD_WITH_VALUE = OpRow("pad", COMPUTE, inputs=(0,))
"""Padding with a number other than 0: a value that the input's encoding may not represent."""


def _fill_value(node: fx.Node) -> object:
    """The number a pad op fills with (0 when it copies values of its input)."""
    if "constant_pad_nd" in str(node.target):
        return node.args[2] if len(node.args) > 2 else 0
    if "_pad_packed_sequence" in str(node.target):
        return node.args[3]
    return node.args[3] if len(node.args) > 3 and node.args[2] == "constant" else 0
