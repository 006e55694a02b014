import pytest
import torch
from torch import fx, nn

from qtk.operators.op_axes import (
    axis_before_reshape,
    permuted_axis,
    same_axis_of_equal_rank,
    selected_axis,
    unexpanded_axis,
)
from qtk.workflow.prepare import prepare_model


@pytest.mark.parametrize(
    ("old", "new", "axis", "expected"),
    [
        ([6, 4], [6, 4], 0, 0),
        ([6, 3, 3], [6, 9], 0, 0),
        ([6, 3, 3], [18, 3], 0, None),
        ([6, 3, 3], [18, 3], 1, 2),
        ([1, 6, 4], [6, 4], 0, 1),
        ([6, 4], [1, 6, 4], 1, 0),
        ([4, 6], [24], 0, None),
        ([2, 3, 4], [2, 12], 1, None),
    ],
)
def test_an_axis_survives_a_reshape_when_its_neighbours_do(old, new, axis, expected):
    found = axis_before_reshape(old, new, axis)
    assert found == expected
    if found is not None:  # independent: elements that agree in the old axis agree in the new one
        index = torch.arange(old[found]).reshape([-1 if i == found else 1 for i in range(len(old))]).expand(old)
        moved = index.reshape(new).movedim(axis, 0).flatten(1)
        assert torch.equal(moved, torch.arange(new[axis])[:, None].expand_as(moved))


def moved_by(op, source, *args):
    """The node of one op on one value, and that value's node."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = source
    node = graph.call_function(op, (x, *args))
    node.meta["val"] = op(source, *args)
    return node, x


@pytest.mark.parametrize(
    ("find", "op", "args", "lengths", "lost"),
    [
        (permuted_axis, torch.ops.aten.permute.default, ([2, 0, 1],), (2, 3, 5), []),
        (permuted_axis, torch.ops.aten.transpose.int, (0, -1), (2, 3, 5), []),
        (same_axis_of_equal_rank, torch.ops.aten.slice.Tensor, (1, 0, 2), (2, 3, 5), []),
        (same_axis_of_equal_rank, torch.ops.aten.select.int, (1, 0), (2, 3, 5), [0, 1]),
        (unexpanded_axis, torch.ops.aten.expand.default, ([2, 3, 5],), (2, 3, 1), [2]),
        (unexpanded_axis, torch.ops.aten.repeat.default, ([1, 2, 1],), (2, 3, 5), [1]),
    ],
)
def test_an_axis_of_the_result_is_found_in_the_source(find, op, args, lengths, lost):
    node, source = moved_by(op, torch.zeros(lengths), *args)
    source_axes = {axis: find(node, source, axis) for axis in range(node.meta["val"].ndim)}
    assert [axis for axis, source_axis in source_axes.items() if source_axis is None] == lost
    for axis, source_axis in source_axes.items():
        if source_axis is not None:  # independent: a source that varies along its axis alone varies along this one
            index = torch.arange(lengths[source_axis]).reshape([-1 if i == source_axis else 1 for i in range(3)])
            varying = op(index.expand(lengths), *args).movedim(axis, 0).flatten(1)
            assert (varying == varying[:, :1]).all()
            assert varying[:, 0].unique().numel() == varying.shape[0]


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        (lambda x, i: x[i], {0: None, 1: 1, 2: 2}),
        (lambda x, i: x[i.reshape(2, 1)], {0: None, 1: None, 2: 1, 3: 2}),
        (lambda x, i: x[:, i], {0: 0, 1: None, 2: 2}),
        (lambda x, i: x.index_select(-1, i), {0: 0, 1: 1, 2: None}),
        (lambda x, i: x[i, i], {0: None, 1: None}),
    ],
)
def test_indices_leave_the_other_axes(select, expected):
    class Net(nn.Module):
        def forward(self, x, index):
            return select(x, index)

    inputs = torch.randn(3, 4, 5), torch.tensor([2, 0])
    graph = prepare_model(Net(), inputs, dynamic_shapes=None).graph
    (moved,) = graph.output_node().all_input_nodes
    source = graph.find_nodes(op="placeholder")[0]
    assert {axis: selected_axis(moved, source, axis) for axis in range(moved.meta["val"].ndim)} == expected


def test_an_expanded_value_has_its_axes_last():
    moved, source = moved_by(torch.Tensor.expand, torch.empty(1, 5), 4, 3, 5)
    assert [unexpanded_axis(moved, source, axis) for axis in range(3)] == [None, None, 1]
