import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.graph.token_layouts import TokenLayouts
from qtk.numerics.token_layout import TokenLayout

SAMPLES, TOKENS, WIDTH = 2, 5, 12


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.fc, self.words, self.function = nn.Linear(WIDTH, WIDTH), nn.Embedding(9, WIDTH), function

    def forward(self, x):
        return self.function(self, x)


def found(function):
    """What is known of the tokens in the result of a function of [samples, tokens, width]."""
    graph = qtk.prepare_model(Apply(function).eval(), torch.randn(SAMPLES, TOKENS, WIDTH))
    (x,) = graph.graph.find_nodes(op="placeholder")
    layouts = TokenLayouts(graph, {x: TokenLayout.of_shape((SAMPLES, TOKENS, WIDTH), (False, True, True))})
    (result,) = graph.graph.output_node().all_input_nodes
    return str(layouts[result]), layouts[result]


@pytest.mark.sample(4)
@pytest.mark.medium
@pytest.mark.parametrize(("function", "expected"), [
    (lambda net, x: net.fc(x).relu() + 1, "[samples, tokens, 12]"),
    (lambda net, x: 1 - x[None], "[1, samples, tokens, 12]"),
    (lambda net, x: x.movedim(1, 0).flatten(0, 1), "[tokens·samples, 12]"),
    (lambda net, x: x.unflatten(-1, (3, 4)).permute(2, 0, 1, 3)[1], "[samples, tokens, 4]"),
    (lambda net, x: torch.stack(x.chunk(3, -1))[0], "[samples, tokens, 4]"),
    (lambda net, x: x.split([4, 8], -1)[1], "[samples, tokens, 8]"),
    (lambda net, x: x.unbind(-1)[2], "[samples, tokens]"),
    (lambda net, x: x.mean(-1, keepdim=True), "[samples, tokens, 1]"),
    (lambda net, x: torch.cat([x, x], -1), "[samples, tokens, 24]"),
    (lambda net, x: x[..., :3], "[samples, tokens, 3]"),
    (lambda net, x: x @ net.fc.weight, "[samples, tokens, 12]"),
    (lambda net, x: x @ x.mT, "[samples, tokens, keys]"),
    (lambda net, x: (x @ x.mT).softmax(-1) @ x, "[samples, tokens, 12]"),
    (lambda net, x: x[..., 0][:, None] + x @ x.mT, "[samples, tokens, keys]"),
    (lambda net, x: torch.addmm(net.fc.bias, x.reshape(-1, WIDTH), net.fc.weight), "[samples·tokens, 12]"),
    (lambda net, x: net.words(x[..., 0].abs().long().clamp(max=8)), "[samples, tokens, 12]"),
    (lambda net, x: F.scaled_dot_product_attention(x, x, x), "[samples, tokens, 12]"),
    (lambda net, x: F.layer_norm(x, (WIDTH,)), "[samples, tokens, 12]"),
    (lambda net, x: F.conv1d(x.mT, net.fc.weight[..., None]), "[samples, 12, tokens]"),
    (lambda net, x: torch.zeros(WIDTH) + 1, "None"),
    (lambda net, x: x.flip(-1), "[samples, tokens, 12]"),
    (lambda net, x: x.topk(3, -1)[0], "[samples, tokens, 3]"),
])
def test_followed(function, expected):
    assert found(function)[0] == expected


@pytest.mark.medium
@pytest.mark.parametrize("function", [
    lambda net, x: x.mean(1), lambda net, x: x[:, 0], lambda net, x: x.sum(), lambda net, x: x.unbind(1)[2],
    lambda net, x: x.amax((0, 1), keepdim=True), lambda net, x: x.mT @ x, lambda net, x: x.mean(0) + 1,
])
def test_a_value_of_all_tokens_or_of_one_has_none(function):
    assert found(function)[1] is None


@pytest.mark.sample(3)
@pytest.mark.medium
@pytest.mark.parametrize(("function", "op"), [
    (lambda net, x: x[:, 1:], "slice"),
    (lambda net, x: torch.cat([x[:, :1] * 0, x], 1), "cat"),
    (lambda net, x: F.avg_pool1d(x.mT, 2), "avg_pool1d"),
    (lambda net, x: torch.relu(x[:, 1:]) + 1, "slice"),
    (lambda net, x: x.reshape(2 * SAMPLES, -1), "reshape"),
    (lambda net, x: x.flip(1), "flip"),
    (lambda net, x: x.roll(1, 1), "roll"),
    (lambda net, x: x.sort(1)[0], "sort"),
    (lambda net, x: x.index_select(1, torch.tensor([4, 3, 2, 1, 0])), "index_select"),
    (lambda net, x: x[:, torch.tensor([4, 3, 2, 1, 0])], "index"),
])
def test_lost(function, op):
    text, followed = found(function)
    assert isinstance(followed, str)
    assert op in text
