"""The axis of the channels of a value: what its readers sum over."""

from __future__ import annotations

from torch import Tensor, fx

from qtk.graph.flow import Flow, maker
from qtk.graph.insert import quantizer_called
from qtk.graph.sites import Port
from qtk.operators.lookup import row_of
from qtk.operators.op_row import OpRow, Product, Role, Scaling

NORMS = (Scaling.SCALE_SHIFT, Scaling.CHANNEL_NORM)
"""What becomes of the factors of channels in norms whose channels are axis 1."""

MOST_READERS = 200
"""Ops that are followed behind a value."""


def channel_axis(flow: Flow, value: fx.Node) -> int | None:
    """The axis that a matrix product behind a value sums over; ``None`` if none does, or if a reshape mixed it.

    Readers are followed through movement, quantizers and ops whose result has the shape of the value: sums, activation
    functions, norms, whose own axis counts too. Where no reader tells it, the product that makes the value does, by the
    axis of its output channels.

    Args:
        flow: of the graph of the value.
        value: a node whose value is a tensor.

    >>> from torch import fx, nn, randn
    >>> import qtk
    >>> model = nn.Sequential(nn.Conv1d(4, 6, 3), nn.ReLU(), nn.Conv1d(6, 2, 1)).eval()
    >>> graph = qtk.prepare_model(model, randn(2, 4, 9)).graph
    >>> [channel_axis(Flow(graph), node) for node in graph.nodes if "relu" in node.name or "input" in node.name]
    [1, 1]
    """
    found = _of_readers(flow, value, set())
    return _of_maker(flow, value) if found is None else found


def _of_readers(flow: Flow, value: fx.Node, seen: set[fx.Node]) -> int | None:
    if value in seen or len(seen) > MOST_READERS:
        return None
    seen.add(value)
    for port in flow.readers(value):
        axis = _summed(port)
        if axis is None and _keeps_shape(port):
            axis = _of_readers(flow, port.user, seen)
        if axis is not None and (axis := _before(flow, port.value, value, axis)) is not None:
            return axis
    return None


def _before(flow: Flow, moved: fx.Node, value: fx.Node, axis: int) -> int | None:
    """The axis of ``value`` that became ``axis`` of a value that was moved from it."""
    root, at = flow.axis_at_root(moved, axis), flow.root(moved)
    if root is None or at is value:
        return root
    return root if at is flow.root(value) and value.meta["val"].ndim == at.meta["val"].ndim else None


def _summed(port: Port) -> int | None:
    """The axis of what an op reads at a port that it sums over, or norms."""
    row, value = row_of(port.user), port.value.meta["val"]
    if row is None or not isinstance(value, Tensor) or value.ndim < 2:
        return None
    if row.product is not None and port.arg in (row.data_arg, *row.weights):
        return _of_product(row, port, value.ndim)
    if row.scaling is Scaling.TRAILING_NORM:
        return value.ndim - 1
    return 1 if row.scaling in NORMS else None


def _of_product(row: OpRow, port: Port, rank: int) -> int | None:
    if row.product is Product.IN_OUT:
        return rank - 1 if port.arg == row.data_arg else rank - 2
    if port.arg != row.data_arg:
        return None
    if row.product is Product.OUT_IN:
        return rank - 1
    weight = port.user.args[row.weights[0]]
    assert isinstance(weight, fx.Node)
    return rank - int(weight.meta["val"].ndim) + 1


def _keeps_shape(port: Port) -> bool:
    """Says whether the op that reads a value returns one of its shape, element by element."""
    row, result, value = row_of(port.user), port.user.meta.get("val"), port.value.meta["val"]
    computes = row is not None and row.role in (Role.COMPUTE, Role.MERGE)
    is_elementwise = computes or quantizer_called(port.user) is not None
    return is_elementwise and isinstance(result, Tensor) and _lengths(result) == _lengths(value)


def _of_maker(flow: Flow, value: fx.Node) -> int | None:
    """The axis of the output channels of the product that makes a value, behind ops that keep its shape."""
    node = maker(flow.root(value))
    while quantizer_called(node) is not None or ((row := row_of(node)) is not None and row.activation):
        node = maker(flow.root(node.all_input_nodes[0]))
    row, made = row_of(node), node.meta.get("val")
    if row is None or row.product is None or not isinstance(made, Tensor) or made.ndim < 2:
        return None
    if _lengths(made) != _lengths(value.meta["val"]):
        return None
    return made.ndim - 1 if row.product in (Product.OUT_IN, Product.IN_OUT) else 1


def _lengths(value: Tensor) -> list[str]:
    """The lengths of all axes as text: to compare a free length with a number would fix it, where they are equal."""
    return [str(length) for length in value.shape]
