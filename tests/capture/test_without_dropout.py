import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qtk.capture.without_dropout import WithoutDropout, attentions_that_drop, calls_that_drop
from qtk.nn.attention import Attention
from qtk.workflow.prepare import prepare_model

X = torch.randn(4, 3)


def run(model, x=X):
    mode = WithoutDropout(model.train())
    with torch.no_grad(), mode:
        return model(x), mode


class DropPath(nn.Module):
    """Called like timm's, by a name of its own."""

    def forward(self, x):
        return x * torch.bernoulli(torch.full((len(x), 1), 0.5)) if self.training else x


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


def test_a_module_that_returns_its_input_in_eval_mode_returns_it_in_train_mode():
    model = nn.Sequential(nn.Linear(3, 3), DropPath(), nn.Sequential(DropPath(), nn.ReLU()))
    y, mode = run(model)
    assert torch.equal(y, model[0](X).relu())
    assert mode.modules == {model[1], model[2][0]}
    assert mode.calls.total() == 0


def test_random_numbers_after_it_are_those_of_a_model_without_it():
    torch.manual_seed(0)
    with_it, _ = run(nn.Sequential(DropPath(), Noise()))
    torch.manual_seed(0)
    without, mode = run(nn.Sequential(Noise()))
    assert torch.equal(with_it, without)
    assert mode.modules == set()


def test_a_module_that_writes_in_place_is_run_once_on_its_input():
    class Doubled(nn.Module):
        def forward(self, x):
            return x.mul_(2)

    class Halved(nn.Module):
        def forward(self, x):
            return x.mul_(2) / 4 if self.training else x.mul_(2)

    for module, factor in ((Doubled(), 2), (Halved(), 0.5)):
        y, mode = run(module, X.clone())
        assert torch.equal(y, factor * X)
        assert mode.modules == set()


@pytest.mark.parametrize("drop", [F.dropout, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout])
def test_dropout_functions_are_counted_once_each(drop):
    class Always(nn.Module):
        def forward(self, x):
            return drop(x, 0.5, self.training) + 1

    y, mode = run(Always())
    assert torch.equal(y, X + 1)
    assert mode.calls == {"dropout": 1}


def test_a_module_that_runs_in_train_mode_only_is_no_dropout():
    class TrainOnly(nn.Module):
        def forward(self, x):
            assert self.training
            return x + 1

    y, mode = run(TrainOnly())
    assert torch.equal(y, X + 1)
    assert mode.modules == set()


def test_probabilities_inside_one_op_are_off():
    model = nn.ModuleDict({
        "attention": nn.MultiheadAttention(3, 1, dropout=0.5), "lstm": nn.LSTM(3, 3, 2, dropout=0.5),
    })
    model.mine = Attention(is_causal=False, scale=None, enable_gqa=False, p=0.5)
    assert attentions_that_drop(model) == 2
    WithoutDropout(model)
    assert (model["attention"].dropout, model["lstm"].dropout, model.mine.p) == (0.0, 0.0, 0.0)
    assert attentions_that_drop(model) == 0


def test_the_calls_of_a_graph_are_counted_without_a_run():
    class Net(nn.Module):
        def forward(self, x):
            p = 0.5 if self.training else 0.0
            x = F.dropout(F.dropout(x, 0.5, self.training), 0.0, self.training)
            return F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=p)

    graph = prepare_model(Net(), X, verify=False)
    _, mode = run(copy.deepcopy(graph))
    assert calls_that_drop(graph) == +mode.calls == {"dropout": 1}
