"""Decides for every batch norm what it can be folded into."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, fx, nn

from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.flow import Flow, maker
from qtk.graph.graphs import graphs
from qtk.graph.sites import EXCLUDED, OWNER, Port, join, label, value_site
from qtk.operators.lookup import row_of
from qtk.operators.op_row import OpRow, Product, Scaling
from qtk.operators.op_table import DROPOUT
from qtk.operators.targets import attribute, batch_norm_called, schema_arguments
from qtk.torch_private import length_hint
from qtk.transforms.fold_batch_norm_step import FoldBatchNorm, Into, Layer, owner_of
from qtk.transforms.fold_rectified_step import FoldRectifiedBatchNorm
from qtk.transforms.graph_editor import beside, weight_parameter
from qtk.transforms.named_tensors import NamedTensors
from qtk.transforms.proof import Group

MOST_NOISE = 16.0
"""How much more noise weights of a layer may add when a batch norm in front is folded into them: 24 dB of some 40."""


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One call of a batch norm.

    Args:
        graph: the graph that calls it.
        flow: of the graph.
        node: the call.
        module: by whose settings it normalises.
        tensors: names of γ, β, mean, variance; ``None`` where there is none.
    """

    graph: CapturedGraph
    flow: Flow
    node: fx.Node
    module: nn.Module
    tensors: tuple[str | None, ...]

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for calls that compute the same function."""
        return (*self.tensors, self.eps)

    @property
    def eps(self) -> float:
        """Added to the variance."""
        return float(self.module.eps)  # type: ignore[arg-type]


class _NotFoldable(Exception):  # noqa: N818 - it is a reason
    """Why a batch norm cannot be folded into a layer."""


def foldable_batch_norms(model: nn.Module) -> list[Group]:
    """One group for every batch norm, in graph order; batch norms that are left have no steps, and the reason.

    Args:
        model: a prepared model without quantizers; not changed.
    """
    return list(_Finder(model).groups())


class _Finder:
    def __init__(self, model: nn.Module) -> None:
        self._members = NamedTensors(model)
        self._uses: dict[str, list[fx.Node]] = {}
        self._calls: list[_Call] = []
        for graph in graphs(model).values():
            flow = Flow(graph.graph)
            for node in graph.graph.nodes:
                if node.op == "get_attr" and (name := self._name(node)) is not None:
                    self._uses.setdefault(name, []).extend(node.users)
                if (module := batch_norm_called(node)) is not None:
                    tensors = tuple(self._name(argument) for argument in node.args[1:5])
                    self._calls.append(_Call(graph, flow, node, module, tensors))
        self._outside = _held_outside(model, self._members)

    def groups(self) -> Iterator[Group]:
        pending = list(self._calls)
        while pending:
            call = pending[0]
            together = [other for other in pending if other.identity == call.identity]
            group, used = self._group(call, together)
            pending = [other for other in pending if other not in used]
            yield group

    def _group(self, call: _Call, together: list[_Call]) -> tuple[Group, list[_Call]]:
        """The group that ``call`` belongs to, and its calls."""
        name = label(call.node, OWNER) or str(call.node.target)
        if label(call.node, EXCLUDED):
            return Group(name, (), "excluded from quantization"), [call]
        if getattr(call.module, "always_batch_statistics", False) or None in call.tensors[2:]:
            return Group(name, (), "normalises by the statistics of the batch, it has no running ones"), [call]
        try:
            layer, calls, ops = self._producer(call, together)
            step = self._step(calls, Into.PRODUCER, (layer,))
            sites = tuple(dict.fromkeys(value_site(op) for op in ops))
            return Group(name, (step,), f"into {owner_of(layer.weight)}", sites), calls
        except _NotFoldable as error:
            reason = str(error)
        try:
            layers = self._consumers(call)
            detail = f"into {', '.join(owner_of(layer.weight) for layer in layers)}, behind it"
            return Group(name, (self._step([call], Into.CONSUMERS, layers),), detail), [call]
        except _NotFoldable as error:
            reason = f"{reason}; {error}"
        with contextlib.suppress(_NotFoldable):
            step, op = self._rectified(call)
            detail = f"into {owner_of(step.layers[0].weight)}, in front of a rectifier, and a sum"
            changed = tuple(dict.fromkeys(map(value_site, (op, *_between(call, op)))))
            return Group(name, (step,), detail, changed), [call]
        step = self._step(together, Into.SCALE_SHIFT, ())
        return Group(name, (step,), f"became a scale and a shift: {reason}"), together

    def _step(self, calls: Sequence[_Call], into: Into, layers: tuple[Layer, ...]) -> FoldBatchNorm:
        weight, bias, mean, var = calls[0].tensors
        assert mean is not None
        assert var is not None
        sites = tuple(dict.fromkeys(value_site(call.node) for call in calls))  # several graphs have one
        new = (beside(mean, "scale"), beside(mean, "shift"))
        own = [name for name in (weight, bias) if name is not None]
        affine = (weight or new[0], bias or new[1]) if self._only_read_by(own, [call.node for call in calls]) else new
        like = self._members.tensor(mean).detach()
        output_mean = torch.zeros_like(like) if bias is None else self._members.tensor(bias).detach()
        output_std = torch.ones_like(like) if weight is None else self._members.tensor(weight).detach().abs()
        return FoldBatchNorm(
            sites, into, layers, weight, bias, mean, var, calls[0].eps, *affine, output_mean, output_std
        )

    def _producer(self, call: _Call, together: list[_Call]) -> tuple[Layer, list[_Call], list[fx.Node]]:
        """The layer before ``call``, all calls that follow a use of its weight, and these uses.

        Raises: _NotFoldable
        """
        layer, _ = self._layer_before(call)
        uses = self._uses[layer.weight]
        followers = []
        for other in together:
            try:
                other_layer, other_op = self._layer_before(other)
            except _NotFoldable:
                continue
            if other_layer == layer:
                followers.append((other, other_op))
        ops = [other_op for _, other_op in followers]
        self._check_owned(layer, ops, uses)
        return layer, [other for other, _ in followers], ops

    def _rectified(self, call: _Call) -> tuple[FoldRectifiedBatchNorm, fx.Node]:
        """The step that folds ``call`` through rectifiers, and the op of its layer. Raises: _NotFoldable."""
        layer, op = self._layer_before(call, rectifiers=True)
        self._check_owned(layer, [op], self._uses[layer.weight])
        layers: tuple[Layer, ...] = (layer,)
        weight = call.tensors[0]
        if weight is not None and bool((self._members.tensor(weight) < 0).any()):
            layers = (layer, *self._consumers(call, signs=True))
        fold = self._step([call], Into.RECTIFIED, layers)
        values = {field.name: getattr(fold, field.name) for field in fields(fold)}
        trailing = call.node.meta["val"].ndim - 2
        return FoldRectifiedBatchNorm(**values | {"shift": beside(fold.mean, "shift")}, trailing=trailing), op

    def _layer_before(self, call: _Call, *, rectifiers: bool = False) -> tuple[Layer, fx.Node]:
        """The layer whose output ``call`` alone reads, and the op; ``rectifiers``, and pooling, may stand between.

        Raises: _NotFoldable
        """
        value, axis = call.node.args[0], 1
        assert isinstance(value, fx.Node)
        while True:
            readers = call.flow.next_ops(value)
            others = [reader for reader in readers if reader is not call.node]
            if len(readers) != 1:
                raise _NotFoldable(f"{value_site(value)} is read by {', '.join(map(_reader, others)) or 'it'} too")
            source, row = call.flow.carried(value), call.flow.row(value)
            if rectifiers and row is not None and _keeps_factors(row, value, axis):
                (value, *_) = value.all_input_nodes
                continue
            if source is None or row is None:
                break
            axis = _source_axis(row, value, source, axis)
            value = source
        op = maker(value)
        layer = self._layer(op)
        out_axis = value.meta["val"].ndim - 1 if layer.product in (Product.OUT_IN, Product.IN_OUT) else 1
        if axis != out_axis:
            raise _NotFoldable(f"its channels are not the output channels of {owner_of(layer.weight)}")
        return layer, op

    def _consumers(self, call: _Call, *, signs: bool = False) -> tuple[Layer, ...]:
        """The layers that alone read ``call``, which take up signs alone, or scale and shift. Raises: _NotFoldable."""
        readers = list(call.flow.readers(call.node))
        layers: dict[Layer, list[fx.Node]] = {}
        for port in readers:
            layer = self._layer(port.user)
            self._check_channels(port, layer, call)
            if not signs:
                self._check_takes_shift(port.user, layer)
            layers.setdefault(layer, []).append(port.user)
        if not layers:
            raise _NotFoldable("no layer reads it")
        if not signs:
            self._check_alike(call)
        for layer, ops in layers.items():
            self._check_owned(layer, ops, self._uses[layer.weight])
        return tuple(layers)

    def _check_channels(self, port: Port, layer: Layer, call: _Call) -> None:
        """Raises: _NotFoldable unless the channels of ``call`` are the input channels of the layer at ``port``."""
        row = row_of(port.user)
        assert row is not None
        axis = port.value.meta["val"].ndim - 1 if layer.product in (Product.OUT_IN, Product.IN_OUT) else 1
        if port.arg != row.data_arg or _axis_at(call.flow, port.value, call.node, axis) != 1:
            raise _NotFoldable(f"its channels are not the inputs of {owner_of(layer.weight)}")

    def _check_alike(self, call: _Call) -> None:
        """Raises: _NotFoldable if a range for each row of the weights behind would hold few of the folded columns.

        The noise that rounding adds to a sum over columns grows with the largest factor of one, max γ/σ, and with the
        size of all inputs, √Σσ²; the sum itself is of the size √Σγ².
        """
        weight, _, _, var = (None if name is None else self._members.tensor(name).detach().double()
                             for name in call.tensors)
        assert var is not None
        std = (var + call.eps).sqrt()
        gamma = torch.ones_like(std) if weight is None else weight.abs()
        more = float((gamma / std).max() * std.norm() / gamma.norm().clamp(min=torch.finfo(torch.float64).tiny))
        if more > MOST_NOISE:
            raise _NotFoldable(f"its inputs have standard deviations from {float(std.min()):.2g} to "
                               f"{float(std.max()):.2g}, too far apart for one range")

    def _check_takes_shift(self, op: fx.Node, layer: Layer) -> None:
        """Raises: _NotFoldable unless a layer can take up a shift of its inputs: what it pads would be shifted too."""
        if layer.product in (Product.OUT_IN, Product.IN_OUT):
            return
        given = schema_arguments(op)
        kernel = op.args[1].meta["val"].shape[2:]  # type: ignore[union-attr]
        if layer.product is Product.CONV_TRANSPOSE and any(size != 1 for size in kernel):
            raise _NotFoldable(f"{owner_of(layer.weight)} is transposed: its output has borders")
        padding = given["padding"]
        if padding not in ("valid",) and any(padding if isinstance(padding, (list, tuple)) else [padding]):
            raise _NotFoldable(f"{owner_of(layer.weight)} pads its input")

    def _layer(self, op: fx.Node) -> Layer:
        """The layer that ``op`` computes. Raises: _NotFoldable if it is none, or its weight is no parameter."""
        row = row_of(op)
        if row is None or row.product is None or row.bias is None or row.data_arg is None or op.op != "call_function":
            raise _NotFoldable(f"{_reader(op)} is no layer it folds into")
        weight, name = weight_parameter(op), None
        if weight is not None:
            name = self._name(weight)
        if weight is None or name is None:
            raise _NotFoldable(f"the weight of {_reader(op)} is computed")
        shape = weight.meta["val"].shape
        if row.product is Product.IN_OUT and len(shape) != 2:
            raise _NotFoldable(f"{_reader(op)} multiplies in batches")
        groups = int(schema_arguments(op)["groups"]) if len(shape) > 2 else 1  # type: ignore[arg-type]
        outputs = int(shape[0] if row.product in (Product.OUT_IN, Product.CONV) else shape[1] * groups)
        return Layer(name, self._bias(op, row, name), row.product, outputs, groups)

    def _bias(self, op: fx.Node, row: OpRow, weight: str) -> str:
        """Name of the bias; of a new one if there is none. Raises: _NotFoldable if it is computed."""
        bias = op.args[row.bias] if row.bias is not None and row.bias < len(op.args) else None
        if bias is None:
            owner, _, leaf = weight.rpartition(".")
            return join(owner, leaf.replace("weight", "bias") if "weight" in leaf else f"{leaf}_bias")
        name = self._name(bias)
        if name is None or bias.meta["val"].ndim != 1:  # type: ignore[union-attr]
            raise _NotFoldable(f"the bias of {owner_of(weight)} is computed")
        return name

    def _check_owned(self, layer: Layer, ops: Sequence[fx.Node], uses: Sequence[fx.Node]) -> None:
        """Raises: _NotFoldable if weight or bias are read by anything but ``ops``."""
        if layer.weight in self._outside or layer.bias in self._outside:
            raise _NotFoldable(f"{owner_of(layer.weight)} is used by code outside the graphs too")
        others = [use for use in (*uses, *self._uses.get(layer.bias, ())) if use not in ops]
        if others:
            raise _NotFoldable(f"{layer.weight} is shared with {', '.join(sorted(set(map(_reader, others))))}")

    def _only_read_by(self, names: Sequence[str], nodes: Sequence[fx.Node]) -> bool:
        return all(use in nodes for name in names for use in self._uses.get(name, ()))

    def _name(self, node: object) -> str | None:
        """The name of the parameter or buffer that a node reads."""
        if not isinstance(node, fx.Node) or node.op != "get_attr":
            return None
        owner = node.graph.owning_module
        assert owner is not None
        tensor = attribute(owner, str(node.target))
        return self._members.name(tensor) if isinstance(tensor, Tensor) else None


def _between(call: _Call, op: fx.Node) -> Iterator[fx.Node]:
    """Yields the values between ``op`` and ``call``, which the fold changes."""
    value = call.node.all_input_nodes[0]
    while maker(value) is not op:
        yield value
        value = value.all_input_nodes[0]


def _keeps_factors(row: OpRow, value: fx.Node, axis: int) -> bool:
    """Says whether an op passes on factors ≥ 0 of its input's channels at ``axis``: rectifiers and pooling."""
    if row.scaling is Scaling.WINDOWED:
        return axis == 1 and value.op == "call_function" and value.meta["val"].ndim > 3
    return row.rectifier and row.scaling is Scaling.KEPT


def _source_axis(row: OpRow, value: fx.Node, source: fx.Node, axis: int) -> int:
    """The axis of ``source`` that became ``axis`` of ``value``, with the same length. Raises: _NotFoldable."""
    before = row.input_axis(value, source, axis) if row.input_axis is not None and row is not DROPOUT else None
    lengths = source.meta["val"].shape, value.meta["val"].shape
    if before is None or length_hint(lengths[0][before]) != length_hint(lengths[1][axis]):
        raise _NotFoldable(f"{_reader(value)} stands between")
    return before


def _axis_at(flow: Flow, value: fx.Node, root: fx.Node, axis: int) -> int | None:
    """The axis of ``root`` that became ``axis`` of ``value``, with the same length; ``None`` if there is none."""
    try:
        while value is not root:
            source, row = flow.carried(value), flow.row(value)
            if source is None or row is None:
                return None
            axis, value = _source_axis(row, value, source, axis), source
    except _NotFoldable:
        return None
    return axis


def _held_outside(model: nn.Module, members: NamedTensors) -> set[str]:
    """Names of the tensors that modules outside of all captured graphs hold."""
    inside = {id(module) for graph in graphs(model).values() for module in graph.modules()}
    outside = [module for module in model.modules() if id(module) not in inside]
    held = [t for module in outside for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
    return {name for tensor in held if (name := members.name(tensor)) is not None}


def _reader(node: fx.Node) -> str:
    return "the model's output" if node.op == "output" else value_site(maker(node)).name.removesuffix(":out")
