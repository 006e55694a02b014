import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from qtk.capture.train_mode.custom_backward import custom_functions_run
from qtk.workflow.prepare import prepare_model


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Flipped(Sign):
    @staticmethod
    def backward(ctx, grad):
        return -grad


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(x, factor=2):
        return x * factor

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad, None


sign = Sign.apply  # bound before anyone looks


class Signs(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.embedding, self.fc, self.function = nn.Embedding(8, 4), nn.Linear(4, 4), function

    def forward(self, tokens):
        return {"hidden": [F.relu(self.fc(self.function(self.embedding(tokens))))]}


@pytest.mark.parametrize(("function", "name"), [(sign, "Sign"), (Flipped.apply, "Flipped"), (Doubled.apply, "Doubled")])
@pytest.mark.parametrize("grad", [False, True])
def test_a_function_that_runs_is_named_and_left_as_it_was(function, name, grad):
    model, own = Signs(function), [dict(vars(kind)) for kind in (Sign, Flipped, Doubled)]
    with torch.set_grad_enabled(grad), custom_functions_run() as names:
        within = model(torch.arange(3))["hidden"][0]
    assert names == {name}
    assert [dict(vars(kind)) for kind in (Sign, Flipped, Doubled)] == own
    assert torch.equal(within, model(torch.arange(3))["hidden"][0])
    with pytest.raises(ZeroDivisionError), custom_functions_run():
        raise ZeroDivisionError
    assert [dict(vars(kind)) for kind in (Sign, Flipped, Doubled)] == own


def test_functions_of_torch_have_no_name():
    with custom_functions_run() as names:
        checkpoint(torch.relu, torch.randn(2, 3, requires_grad=True), use_reentrant=True)
    assert names == set()


@pytest.mark.parametrize(("function", "lost"), [(sign, ["Sign"]), (Flipped.apply, ["Flipped"]), (F.silu, [])])
def test_the_report_of_a_model_names_it(function, lost):
    notes = prepare_model(Signs(function), torch.arange(3)).report.train_notes
    assert [note.split(" is not captured")[0] for note in notes] == [f"the backward of {name}" for name in lost]
