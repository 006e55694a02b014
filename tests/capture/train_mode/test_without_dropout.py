import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qtk.capture.train_mode.without_dropout import WithoutDropout
from qtk.nn.attention import Attention

X = torch.randn(4, 3)


def run(model, x=X, train_only=()):
    mode = WithoutDropout(model.train(), train_only)
    with torch.no_grad(), mode:
        return model(x), dict(mode.drops)


class DropPath(nn.Module):
    def forward(self, x):
        return x * torch.bernoulli(torch.full((len(x), 1), 0.5)) if self.training else x


def test_train_only_modules_return_their_input():
    model = nn.Sequential(nn.Linear(3, 3), DropPath(), nn.ReLU())
    y, drops = run(model, train_only=[model[1]])
    assert torch.equal(y, model[0](X).relu())
    assert drops == {}


@pytest.mark.parametrize("drop", [F.dropout, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout])
def test_dropout_functions_are_noted_at_the_module_that_calls_them(drop):
    class Always(nn.Module):
        def forward(self, x):
            return drop(drop(x, 0.5, self.training), 0.3, False) + 1

    y, drops = run(nn.Sequential(nn.Linear(3, 3), Always()).train()[1:])
    assert torch.equal(y, X + 1)
    assert drops == {"1": [0.5, 0.0]}


@pytest.mark.parametrize("call", [
    lambda x, p: F.scaled_dot_product_attention(x, x, x, None, p, False),
    lambda x, p: F.scaled_dot_product_attention(x, x, x, dropout_p=p),
])
def test_attention_drops_nothing_and_is_noted(call):
    class Attends(nn.Module):
        def forward(self, x):
            return call(x[None], 0.5 if self.training else 0.0)

    y, drops = run(Attends())
    assert torch.equal(y, Attends().eval()(X))
    assert drops == {"": [0.5]}


def test_probabilities_inside_one_op_are_off():
    model = nn.ModuleDict({
        "attention": nn.MultiheadAttention(3, 1, dropout=0.5), "lstm": nn.LSTM(3, 3, 2, dropout=0.5),
    })
    model.mine = Attention(is_causal=False, scale=None, enable_gqa=False, p=0.5)
    WithoutDropout(model)
    assert (model["attention"].dropout, model["lstm"].dropout, model.mine.p) == (0.0, 0.0, 0.0)


def test_no_hook_stays():
    model = nn.Sequential(nn.Linear(3, 3))
    run(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
