import torch
from torch import nn

from qtk.capture.in_place import purify


def ops(forward, *inputs):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, *xs):
            return forward(self.fc, *xs)

    program = torch.export.export(Net().eval(), inputs, strict=False)
    purify(program.graph)
    return [str(node.target) for node in program.graph.nodes if node.op == "call_function"]


X = torch.randn(2, 4)


def test_an_activation_over_a_fresh_value_becomes_pure():
    assert ops(lambda fc, x: fc(x).relu_(), X) == ["aten.linear.default", "aten.relu.default"]
    found = ops(lambda fc, x: fc(x).add_(x).clamp_(min=0), X)
    assert found == ["aten.linear.default", "aten.add.Tensor", "aten.clamp.default"]


def test_a_value_with_another_reader_stays():
    def forward(fc, x):
        y = fc(x)
        twice = y * 2
        return twice + y.relu_()

    assert "aten.relu_.default" in ops(forward, X)


def test_a_view_and_an_input_stay():
    assert "aten.relu_.default" in ops(lambda fc, x: fc(x).view(-1).relu_(), X)
    assert "aten.mul_.Tensor" in ops(lambda fc, x: x.mul_(2.0), X)


def test_an_operand_of_another_dtype_stays():
    found = ops(lambda fc, x: fc(x).half().float().add(0).add_(x.double()), X)
    assert "aten.add_.Tensor" in found
