"""What a walk finds in small nets: reads, writes, clamps, products and values, against torch's own layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qtk.capture.prepared_model import PreparedGraph
from qtk.channels.absorbers import Absorbers
from qtk.channels.channel_classes import PINNED, ChannelClasses
from qtk.channels.channel_findings import Findings
from qtk.channels.label_walk import LabelWalk
from tests.transforms.scaling import prepare
from tests.transforms.scaling_nets import batch, linear, net


def found_in(model: nn.Module, example: Tensor, x: Tensor | None = None) -> Findings:
    """The findings of a walk for ``x``."""
    prepared, classes, findings = prepare(model, example), ChannelClasses(), Findings()
    assert isinstance(prepared, PreparedGraph)
    LabelWalk(prepared, classes, Absorbers(prepared, classes), findings).run([example if x is None else x])
    return findings


def test_a_read_has_the_index_of_each_column_a_write_the_smallest_value_of_each_channel() -> None:
    model = net(lambda m, x: m.b(m.a(x).clamp(-0.5, 0.75).mean((2, 3))), a=nn.Conv2d(2, 5, 3), b=linear(5, 3))
    x = batch(2, 4, 4)
    findings = found_in(model, x)
    (first, second), (made, last) = ([record for _, record in records] for records in (findings.reads, findings.writes))
    assert [(read.parameter, read.axis) for read in (first, second)] == [("a.weight", 1), ("b.weight", 1)]
    assert second.index is not None
    assert second.index.expand(3, 5).tolist() == [[0, 1, 2, 3, 4]] * 3
    assert [(write.kind, write.parameter, write.bias) for write in (made, last)] == [
        ("conv2d", "a.weight", "a.bias"), ("linear", "b.weight", "b.bias")]
    assert made.index.expand(5, 2, 3, 3)[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert made.smallest is not None
    with torch.no_grad():
        torch.testing.assert_close(made.smallest, model.a(x).amin((0, 2, 3)))
    ((_, clamp),) = findings.clamps
    assert (clamp.axis, clamp.lower, clamp.upper) == (1, -0.5, 0.75)
    assert torch.equal(clamp.labels, made.labels)
    assert torch.equal(second.labels, made.labels)


def test_without_data_there_is_no_smallest_value() -> None:
    model = net(lambda m, x: m.a(x), a=linear(3, 5))
    ((_, write),) = found_in(model, batch(3), torch.empty(0, 3, dtype=torch.float64)).writes
    assert write.smallest is None
    assert write.labels.shape == (5,)


def test_a_weight_that_is_computed_is_a_read_of_pinned_channels_without_a_parameter() -> None:
    model = net(lambda m, x: F.linear(m.a(x), m.weight.tanh()), a=linear(3, 4), weight=nn.Parameter(torch.ones(2, 4)))
    findings = found_in(model, batch(3))
    (_, computed) = (read for _, read in findings.reads)
    assert (computed.parameter, computed.index) == (None, None)
    assert computed.labels.tolist() == [PINNED] * 4
    assert [write.parameter for _, write in findings.writes] == ["a.weight"]


def test_a_product_of_two_values_is_left_to_be_decided() -> None:
    findings = found_in(net(lambda m, x: m.a(x) * m.b(x), a=linear(3, 5), b=linear(3, 5)), batch(3))
    ((left, right, product),) = findings.products
    (a, b) = (write.labels for _, write in findings.writes)
    assert (left.tolist(), right.tolist()) == (a.tolist(), b.tolist())
    assert len(set(product.tolist()) - set(a.tolist()) - set(b.tolist())) == 5


def test_a_value_has_labels_of_length_1_along_axes_where_they_do_not_vary() -> None:
    model = net(lambda m, x: F.relu(m.a(x)).flatten(2).argmax(2), a=nn.Conv2d(2, 5, 3))
    values = found_in(model, batch(2, 4, 4)).values
    shapes = {node.name.partition("_")[0]: tuple(labels.shape) for node, labels in values}
    assert {shapes["conv2d"], shapes["relu"]} == {(1, 5, 1, 1)}
    assert not any(name.startswith("argmax") for name in shapes)


def test_two_findings_share_nothing() -> None:
    first, second = Findings(), Findings()
    first.products.append((torch.ones(1),) * 3)
    assert second.products == []
