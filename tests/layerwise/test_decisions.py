"""Ops that decide by order, against the same decision written out."""

import operator

import pytest
import torch
from torch import fx

from qtk.layerwise.decisions import decided_as, decides, sorted_stably, sorts_ids

ATEN = torch.ops.aten


def op(target, *args, read=1):
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(target, (x, *args))
    node.meta["val"] = target(torch.zeros(2, 4), *args)
    if read is not None:
        graph.output(graph.call_function(operator.getitem, (node, read)))
    return node


@pytest.mark.parametrize("node", [
    op(ATEN.topk.default, 2), op(ATEN.topk.default, 1, 0), op(ATEN.sort.default, 1), op(ATEN.max.dim, 1),
    op(ATEN.min.dim, 0, True),
], ids=lambda node: str(node.target) + str(node.args[1:]))
def test_values_are_the_own_ones_at_the_other_ones_places(node):
    x, y = torch.randn(2, 4), torch.randn(2, 4)
    assert decides(node)
    result = node.target(x, *node.args[1:])
    values, indices = decided_as(result, node, y)
    assert indices is result[1]
    assert values.shape == result[0].shape
    own, _ = decided_as(result, node, x)
    assert torch.equal(own, result[0])
    for value in values.flatten():
        assert value in y


@pytest.mark.parametrize(("target", "args"), [
    (ATEN.sort.default, ()), (ATEN.sort.default, (0, True)), (ATEN.sort.stable, ()), (ATEN.argsort.default, (1,)),
])
def test_ids_are_sorted_with_equal_ones_in_order(target, args):
    ids = torch.randint(3, (400, 3), generator=torch.Generator().manual_seed(0))
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = ids
    node = graph.call_function(target, (x, *args), {"stable": False} if target is ATEN.sort.stable else {})
    assert sorts_ids(node)
    dim, descending = (*args, -1, False)[:2] if args != (1,) else (1, False)
    expected = (ids * (-1 if descending else 1)).double()
    steps = torch.arange(ids.shape[dim]).reshape([-1 if axis == dim % 2 else 1 for axis in range(2)])
    order = (expected + steps / 1000).argsort(dim)
    found = sorted_stably(node, ids)
    indices = found if target is ATEN.argsort.default else found[1]
    assert torch.equal(indices, order)
    if indices is not found:
        assert torch.equal(found[0], ids.gather(dim, order))
    x.meta["val"] = ids.float()
    assert not sorts_ids(node)


def test_indices_alone_are_taken_over():
    node, indices = op(ATEN.argmax.default, 1, read=None), torch.tensor([1, 2])
    assert decides(node)
    assert decided_as(indices, node, torch.randn(2, 4)) is indices
    assert not decides(op(ATEN.amax.default, [1], read=None))
    assert not decides(op(ATEN.max.default, read=None))


def test_a_maximum_that_is_read_as_a_value_is_each_path_s_own():
    assert not decides(op(ATEN.max.dim, 1, read=0))
