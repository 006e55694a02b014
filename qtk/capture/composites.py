"""Composites: the ``qtk.nn`` modules that replace fused recurrent ops and fused attention, with their parts inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import fx, nn

from qtk.nn.attention import Attention
from qtk.nn.recurrent import Kind, Recurrent, RecurrentCell
from qtk.operators.targets import aten_name, called_module, schema_arguments
from qtk.torch_private import OpOverload, rnn_parameter_names

Composite: TypeAlias = Attention | Recurrent | RecurrentCell

KINDS: dict[str, Kind] = {"lstm": "lstm", "gru": "gru", "rnn_tanh": "rnn_tanh", "rnn_relu": "rnn_relu"}
"""Name of the op, without ``_cell`` → which recurrence it computes."""


@dataclass(frozen=True, slots=True)
class CompositeCall:
    """The call of a composite that replaces an op.

    Args:
        name: attribute name of the composite in the module that calls the op.
        module: the composite.
        arguments: arguments of the call.
        single: whether the composite returns a tuple of one where the op returns a tensor.
    """

    name: str
    module: Composite
    arguments: tuple[fx.node.Argument, ...]
    single: bool = False


def composite_of(node: fx.Node, owner: nn.Module) -> CompositeCall | None:
    """The composite that replaces the op ``node`` calls in the forward of ``owner``; ``None`` if there is none."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return None
    name = aten_name(node.target)
    assert name is not None
    args = schema_arguments(node)
    if name == "scaled_dot_product_attention":
        return _attention(args, owner)
    if name in KINDS:
        return _recurrent(KINDS[name], args)
    if name.removesuffix("_cell") in KINDS:
        return _cell(KINDS[name.removesuffix("_cell")], args)
    return None


def sequence_composite(module: nn.RNNBase) -> tuple[Recurrent, list[str], list[str]]:
    """The composite of a recurrent net, and the names of its weights and biases in the composite's order."""
    kind = KINDS[module.mode.lower()]
    weights, biases = [], []
    for names in rnn_parameter_names(module):
        weights += [name for name in names if name.startswith("weight")]
        biases += [name for name in names if name.startswith("bias")]
    composite = Recurrent(
        kind, num_layers=module.num_layers, bidirectional=module.bidirectional, batch_first=module.batch_first,
        dropout=module.dropout, has_biases=module.bias, projected=module.proj_size > 0,
    )
    return composite, weights, biases


def composite_called(node: fx.Node) -> Composite | None:
    """The composite that ``node`` calls, ``None`` if it calls none."""
    module = called_module(node)
    return module if isinstance(module, Composite) else None


def _attention(args: dict[str, fx.node.Argument], owner: nn.Module) -> CompositeCall:
    p = args["dropout_p"]
    if isinstance(owner, nn.MultiheadAttention):
        p = owner.dropout  # captured in eval mode, where it is 0
    module = Attention(
        is_causal=args["is_causal"], scale=args["scale"], enable_gqa=args["enable_gqa"], p=p,  # type: ignore[arg-type]
    )
    tensors = (args["query"], args["key"], args["value"])
    return CompositeCall("attention", module, tensors if args["attn_mask"] is None else (*tensors, args["attn_mask"]))


def _recurrent(kind: Kind, args: dict[str, fx.node.Argument]) -> CompositeCall:
    layers, bidirectional, has_biases = args["num_layers"], args["bidirectional"], args["has_biases"]
    assert isinstance(layers, int)
    parameters = args["params"]
    assert isinstance(parameters, Sequence)
    per_step = len(parameters) // (layers * (2 if bidirectional else 1))
    first_bias, first_projection = 2, 4 if has_biases else 2
    weights: list[fx.node.Argument] = []
    biases: list[fx.node.Argument] = []
    for start in range(0, len(parameters), per_step):
        step = parameters[start : start + per_step]
        weights += [*step[:first_bias], *step[first_projection:]]
        biases += step[first_bias:first_projection]
    module = Recurrent(
        kind, num_layers=layers, bidirectional=bool(bidirectional), batch_first=bool(args.get("batch_first")),
        dropout=args["dropout"], has_biases=bool(has_biases), projected=per_step > first_projection,  # type: ignore[arg-type]
    )
    sizes = (args["batch_sizes"],) if "batch_sizes" in args else ()
    x = args.get("input", args.get("data"))
    return CompositeCall("recurrence", module, (x, _states(args), weights, biases, *sizes))


def _cell(kind: Kind, args: dict[str, fx.node.Argument]) -> CompositeCall:
    biases: list[fx.node.Argument] = [] if args["b_ih"] is None else [args["b_ih"], args["b_hh"]]
    arguments = (args["input"], _states(args), [args["w_ih"], args["w_hh"]], biases)
    return CompositeCall("recurrence", RecurrentCell(kind, has_biases=bool(biases)), arguments, single=kind != "lstm")


def _states(args: dict[str, fx.node.Argument]) -> list[fx.node.Argument]:
    states = args["hx"]
    return list(states) if isinstance(states, (list, tuple)) else [states]
