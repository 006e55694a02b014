import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.graph.flow import Flow
from qtk.graph.value_kinds import ValueKind, value_kinds

X, IDS = torch.randn(6, 4), torch.arange(6) % 3


def nature_of_output(function, *inputs, dynamic_shapes="batch"):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))

        def forward(self, *args):
            return function(self, *args)

    graph = qtk.prepare_model(Net(), inputs, dynamic_shapes=dynamic_shapes, verify=False).graph
    (output,) = graph.output_node().all_input_nodes
    return value_kinds(graph, Flow(graph))[output]


@pytest.mark.medium
@pytest.mark.parametrize(
    "function",
    [
        lambda net, x, ids: torch.histc(ids.float(), 3, 0, 2).cumsum(0) - 1,
        lambda net, x, ids: torch.bincount(ids, weights=x[:, 0], minlength=3).float(),
        lambda net, x, ids: x.argmax(1).float() * 2 + 1,
        lambda net, x, ids: x.topk(2)[1].to(x.dtype),
        lambda net, x, ids: x.sort(0)[1].float(),
        lambda net, x, ids: F.one_hot(ids, 3).to(x.dtype).sum(0),
        lambda net, x, ids: 1 - (ids == 0).to(x.dtype),
        lambda net, x, ids: torch.cat([(x > 0).float(), (x < 0).float()]).mean(0),
        lambda net, x, ids: torch.searchsorted(net.weight[0].detach(), x[:, 0]).float(),
        lambda net, x, ids: torch.arange(x.shape[0], dtype=torch.float32) / 2,
        lambda net, x, ids: (ids == 0).float()[:, None] * net.weight[0],
    ],
)
def test_counts_indices_offsets_and_masks_are_counts_whatever_their_type(function):
    assert nature_of_output(function, X, IDS) is ValueKind.COUNT


@pytest.mark.parametrize(
    "function",
    [
        lambda net, x, ids: ids.float() / 255,
        lambda net, x, ids: ids.reshape(2, 3).permute(1, 0).float() - 1,
        lambda net, x, ids: x.round().to(torch.int64).float(),
    ],
)
def test_integer_inputs_and_rounded_data_may_be_either(function):
    assert nature_of_output(function, X, IDS, dynamic_shapes=None) is ValueKind.INTEGER


@pytest.mark.medium
@pytest.mark.parametrize(
    "function",
    [
        lambda net, x, ids: x * (ids == 0).float()[:, None],
        lambda net, x, ids: net.weight[ids],
        lambda net, x, ids: F.embedding(ids, net.weight),
        lambda net, x, ids: F.one_hot(ids, 3).float() @ net.weight,
        lambda net, x, ids: x.topk(2)[0],
        lambda net, x, ids: torch.cat([x, ids.float()[:, None]], 1),
        lambda net, x, ids: torch.zeros_like(x) + x,
        lambda net, x, ids: torch.where(x > 0, x, 0.0),
        lambda net, x, ids: ids.float().cos(),
    ],
)
def test_data_selected_or_multiplied_by_indices_is_data(function):
    assert nature_of_output(function, X, IDS) is ValueKind.REAL
