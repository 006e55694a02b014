import torch
from torch import nn

import qtk
from qtk.capture.token_inputs import TokenInputs
from qtk.numerics.token_layout import TokenLayout


class Net(nn.Module):
    def forward(self, x, scale):
        return torch.relu(x) * scale


VALID = torch.ones(2, 5, dtype=torch.bool)


def test_inputs_as_long_as_the_mask_have_tokens():
    graph = qtk.prepare_model(Net().eval(), (torch.randn(2, 5, 8), torch.randn(8)))
    inputs = TokenInputs()
    followed = inputs.followed(graph, (torch.randn(2, 5, 8),), {"scale": torch.randn(8)}, VALID)
    relu, = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    assert isinstance(followed[relu], TokenLayout)
    assert str(followed[relu]) == "[samples, tokens, 8]"
    assert inputs.followed(graph, (torch.randn(2, 5, 8), torch.randn(8)), {}, VALID) is followed
    assert inputs.followed(graph, (torch.randn(2, 4, 8), torch.randn(8)), {}, VALID) is None
    assert inputs.followed(graph, (torch.randn(2, 5, 8),), {}, VALID) is None, "not the arguments of the graph"
