"""Blocks as modules: whose members they hold, and what a second computation of their values may not change."""

import copy

import pytest
import torch
from torch import nn

import qtk
from qtk.capture.block_view import Block, BlockView
from qtk.capture.holders import Holder
from qtk.errors import CaptureError


class Named(nn.Module):
    """Members named as attributes of graphs and modules."""

    def __init__(self):
        super().__init__()
        self.graph = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.meta = nn.ModuleDict({"code": nn.Linear(4, 4), "named_blocks": nn.Linear(4, 4)})
        self.gain = 3.0

    def forward(self, x):
        return self.meta["named_blocks"](self.meta["code"](self.graph(x)))


@pytest.mark.medium
def test_names_of_members_are_the_users():
    x = torch.randn(3, 4)
    prepared = qtk.prepare_model(Named().eval(), x)
    view = qtk.block_view(prepared, ["graph", "meta.code", "meta.named_blocks"])
    assert all(isinstance(view.get_submodule(path), Block) for path in ("graph", "meta.code", "meta.named_blocks"))
    assert torch.equal(view(x), prepared(x))
    assert list(view.state_dict()) == list(prepared.state_dict())
    assert torch.equal(copy.deepcopy(view)(x), prepared(x))


@pytest.mark.medium
def test_what_capture_has_decided_cannot_be_set_on_a_block():
    view = qtk.block_view(qtk.prepare_model(Named().eval(), torch.randn(3, 4)), "meta.code")
    with pytest.raises(CaptureError, match=r"setting 'meta.code.in_features' would have no effect"):
        view.get_submodule("meta.code").in_features = 5


def test_the_tree_holds_blocks_and_shares_all_tables():
    prepared = qtk.prepare_model(Named().eval(), torch.randn(3, 4))
    view = BlockView(prepared, ["graph.0"], recompute=False)
    assert isinstance(view._modules["graph"], Holder)
    assert view._modules["graph"] is not prepared._modules["graph"]
    assert view.get_submodule("graph.0")._parameters is prepared.get_submodule("graph.0")._parameters
    assert view.get_submodule("meta") is prepared.get_submodule("meta")


class Creates(nn.Module):
    def forward(self, x):
        return x @ torch.ones(4, 4, dtype=x.dtype, device=x.device)


@pytest.mark.medium
def test_what_a_block_creates_follows_a_move_of_either():
    for which in ("view", "prepared"):
        prepared = qtk.prepare_model(nn.Sequential(nn.Linear(4, 4), Creates()).eval(), torch.randn(3, 4))
        view = qtk.block_view(prepared, "1")
        {"view": view, "prepared": prepared}[which].double()
        x = torch.randn(3, 4, dtype=torch.float64)
        assert torch.equal(view(x), prepared(x))
        assert view(x).dtype is torch.float64


class Normed(nn.Module):
    def __init__(self, momentum=0.1):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=momentum), nn.Dropout(0.5))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.body(x))


@pytest.mark.medium
@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_batch_counts_once_however_often_it_is_computed(momentum):
    torch.manual_seed(0)
    model, x = Normed(momentum), torch.randn(16, 4)
    prepared = qtk.prepare_model(model.eval(), x)
    view = qtk.block_view(prepared, "body", checkpoint=True)
    prepared.train()  # as good as view.train()
    twin = copy.deepcopy(model).train()
    outputs = []
    for each in (view, twin):
        for seed in range(3):
            torch.manual_seed(seed)
            output = each(x)
            output.sum().backward()
        outputs.append(output)
    assert torch.equal(*outputs)
    state = view.state_dict()
    assert int(state["body.1.num_batches_tracked"]) == 3
    assert all(torch.equal(state[name], value) for name, value in twin.state_dict().items())
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(view.parameters(), twin.parameters(), strict=True))
    with torch.no_grad():
        view(x)
    assert int(state["body.1.num_batches_tracked"]) == 4


@pytest.mark.medium
def test_a_graph_that_is_retained_is_computed_a_third_time():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Sigmoid()))
    prepared = qtk.prepare_model(model.eval(), torch.randn(16, 4))
    view = qtk.block_view(prepared, "1", checkpoint=True).train()
    loss = view(torch.randn(16, 4)).sum()
    loss.backward(retain_graph=True)
    (first,) = (p.grad.clone() for name, p in view.named_parameters() if name == "0.weight")
    loss.backward()
    assert torch.equal(view.get_submodule("0").weight.grad, 2 * first)
    assert int(view.state_dict()["1.0.num_batches_tracked"]) == 1


class Centred(nn.Module):
    """Subtracts a mean that it moves towards each batch itself."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        y = self.linear(x - self.mean)
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return y


@pytest.mark.medium
def test_a_block_that_writes_its_own_buffers_is_computed_again_with_what_they_were():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), Centred(), nn.Linear(4, 2)).eval(), torch.randn(16, 4)
    twin, prepared = copy.deepcopy(model), qtk.prepare_model(model, x)
    view = qtk.block_view(prepared, "1", checkpoint=True)
    for factor in (1.0, 2.0):
        outputs = [each(factor * x) for each in (view, twin)]
        for output in outputs:
            output.square().sum().backward()
        assert torch.equal(*outputs)
    for name, parameter in twin.named_parameters():
        assert torch.equal(parameter.grad, view.get_parameter(name).grad), name
    for name, buffer in twin.named_buffers():
        assert torch.equal(buffer, view.get_buffer(name)), name
