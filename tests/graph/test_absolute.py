import torch
from torch import nn

from qtk.graph.absolute import absolute_values
from qtk.graph.flow import Flow
from qtk.graph.sites import is_float
from qtk.workflow.prepare import prepare_model


def absolute(code, *inputs):
    """The names of the values that depend on the inputs and are read by their absolute size alone."""

    class Net(nn.Module):
        def forward(self, *tensors):
            return code(*tensors)

    graph = prepare_model(Net().eval(), inputs).graph
    flow = Flow(graph)
    return {node.name for node in absolute_values(graph, flow) if is_float(node) and not flow.is_static(node)}


X, Y = torch.rand(2, 4), torch.rand(2, 4)


def test_arguments_of_sines_and_what_makes_them():
    assert absolute(lambda t, y: torch.cat([(t * 9 + 1).sin(), (t * 9 + 1).cos()], 1), X, Y) >= {"tensors_0", "mul"}


def test_what_something_else_reads_too_is_data():
    assert absolute(lambda t, y: (t * 9).sin() + t * 9, X, Y) == {"mul"}
    assert absolute(lambda t, y: t * y, X, Y) == set()


def test_rounded_and_cast_values():
    assert "mul" in absolute(lambda x, y: (x * 40).floor() + y, X, Y)
    assert "mul" in absolute(lambda x, y: y[torch.arange(2), (x[:, 0] * 3).long()], X, Y)
    assert "mul" not in absolute(lambda x, y: torch.where(x * 3 > 1, y, 0 * y), X, Y)
