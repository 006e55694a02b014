import torch
from torch import nn

from qtk.calls.calls import Call
from qtk.capture.fallback import capture_graph
from qtk.capture.free_axes import FreeAxes, at_most_rows, two_rows
from qtk.workflow.prepare import prepare_model


def graph_of(model, call, dynamic_shapes="batch"):
    return capture_graph(model, [call], dynamic_shapes, verify=False)


def test_inputs_are_cut_or_repeated():
    model, call = nn.Identity(), Call((torch.arange(6.0).view(2, 3),), {}, None)
    axes = FreeAxes(graph_of(model, call, "all"), call)
    assert axes.lengths_in(call) == axes.lengths == {("input", 0): 2, ("input", 1): 3}
    (x,), _ = axes.call({("input", 0): 3, ("input", 1): 2})
    assert x.tolist() == [[0.0, 1.0], [3.0, 4.0], [0.0, 1.0]]


class Step(nn.Module):
    """A step of a recurrent net, whose states have the batch in axis 1."""

    def forward(self, x, states):
        return torch.cat([x[None], states])


def test_two_rows_are_taken_along_every_axis_of_the_batch():
    for rows in (1, 2, 7):
        call = Call((torch.randn(rows, 3), torch.randn(2, rows, 3)), {}, None)
        few = two_rows(graph_of(Step(), call), call)
        assert [tuple(tensor.shape) for tensor in few.args] == [(2, 3), (2, 2, 3)]
        assert (few is call) == (rows == 2)
        assert torch.equal(few.args[0][0], call.args[0][0])


def test_a_batch_is_cut_to_its_first_rows():
    call = Call((torch.randn(9, 3), torch.randn(2, 9, 3)), {}, None)
    graph = graph_of(Step(), call)
    few = at_most_rows(graph, call, 4)
    assert torch.equal(few.args[0], call.args[0][:4])
    assert torch.equal(few.args[1], call.args[1][:, :4])
    assert at_most_rows(graph, call, 9) is call


def test_lengths_go_by_name_whatever_the_order_of_the_arguments():
    call = Call((torch.randn(5, 3), torch.randn(2, 5, 3)), {}, None)
    axes = FreeAxes(graph_of(Step(), call), call)
    other = Call((), {"states": torch.randn(2, 4, 3), "x": torch.randn(4, 3)}, None)
    assert axes.lengths_in(other) == {("x", 0): 4, ("states", 0): 2, ("states", 1): 4}


ROWS = []


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        if self.training and not torch.compiler.is_exporting():
            ROWS.append(len(x))
        return self.norm(x)


def test_train_mode_is_compared_on_two_rows():
    ROWS.clear()
    assert prepare_model(Norm(), torch.randn(64, 3)).report.train_difference == 0.0
    assert set(ROWS) == {2}


class Fourfold(Norm):
    """Takes whole groups of four in train mode alone, so that two rows tell nothing."""

    def forward(self, x):
        if self.training:
            x = x.view(4, -1, 3).flatten(0, 1)
        return super().forward(x)


def test_a_train_mode_that_does_not_take_two_rows_is_compared_on_the_example():
    ROWS.clear()
    report = prepare_model(Fourfold(), torch.randn(8, 3)).report
    assert report.train_difference == 0.0, report.train_notes
    assert set(ROWS) == {8}
