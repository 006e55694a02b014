import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qtk.capture.train_mode.train_branches import failure
from qtk.errors import VerificationError

X = torch.randn(4, 8)
NUMBERS = VerificationError("output differs by 3")


class Of(nn.Module):
    """A linear layer, then what a test wants, in a child of its own."""

    def __init__(self, code, **members):
        super().__init__()
        self.fc, self.block = nn.Linear(8, 8), Code(code, members)

    def forward(self, x):
        return self.block(self.fc(x))


class Code(nn.Module):
    def __init__(self, code, members):
        super().__init__()
        self.code = code
        for name, module in members.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.code(self, x)


def text(model, train_only=()):
    return failure(model, (X,), {}, train_only, NUMBERS)


@pytest.mark.parametrize(("model", "expected"), [
    (Of(lambda self, x: x * 2 if self.training else x), "block (Code) in train mode alone calls torch's mul(2)"),
    (Of(lambda self, x: x * (2 if self.training else 3)),
     "block (Code) in train mode alone calls torch's mul(2), in eval mode alone calls torch's mul(3)"),
    (Of(lambda self, x: {"x": x, "aux": self.aux(x)} if self.training else {"x": x}, aux=nn.Linear(8, 2)),
     "block (Code) in train mode alone calls block.aux (Linear), returns dict of float32 [4, 8], float32 [4, 2], "
     "in eval mode alone returns dict of float32 [4, 8]"),
    (Of(lambda self, x: x.relu().relu() if self.training else x.relu()),
     "block (Code) does the same things in both modes, but not as often"),
])
def test_the_module_and_what_it_does_are_named(model, expected):
    assert text(model).startswith(expected)


def test_dropout_norms_and_train_only_modules_are_no_branches():
    class Noise(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x) if self.training else x

    model = Of(lambda self, x: self.bn(F.dropout(self.noise(self.drop(x)), 0.5, self.training)), noise=Noise(),
               drop=nn.Dropout(0.5), bn=nn.BatchNorm1d(8))
    assert text(model, [model.block.noise, model.block.drop]) == "Of: output differs by 3"


def test_many_are_counted():
    model = nn.Sequential(*[Code(lambda self, x: x * 2 if self.training else x, {}) for _ in range(6)])
    assert text(model).endswith("; and 2 more modules")


def test_a_model_that_fails_in_train_mode_has_its_numbers():
    def code(self, x):
        assert not self.training
        return x

    assert text(Of(code)) == "Of: output differs by 3"


def test_the_model_is_left_as_it_was():
    model = Of(lambda self, x: self.bn(x) * 2 if self.training else self.bn(x), bn=nn.BatchNorm1d(8)).train()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    text(model)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules())
