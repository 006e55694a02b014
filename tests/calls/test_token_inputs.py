import torch
from torch import nn

import qtk
from qtk.calls.token_inputs import Masked, TokenInputs
from qtk.calls.token_masks import TokenMasks


class Net(nn.Module):
    def forward(self, x, scale):
        return torch.relu(x) * scale


VALID = torch.ones(2, 5, dtype=torch.bool)
MASKS = TokenMasks.of(VALID)


def test_inputs_as_long_as_the_mask_have_tokens():
    graph = qtk.prepare_model(Net().eval(), (torch.randn(2, 5, 8), torch.randn(8)))
    inputs = TokenInputs()
    followed = inputs.followed(graph, (torch.randn(2, 5, 8),), {"scale": torch.randn(8)}, MASKS)
    relu, = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    assert isinstance(followed[relu], Masked)
    assert str(followed[relu].layout) == "[samples, tokens, 8]"
    assert inputs.followed(graph, (torch.randn(2, 5, 8), torch.randn(8)), {}, MASKS) is followed
    assert inputs.followed(graph, (torch.randn(2, 4, 8), torch.randn(8)), {}, MASKS) is None
    assert inputs.followed(graph, (torch.randn(2, 5, 8),), {}, MASKS) is None, "not the arguments of the graph"
