import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from qtk.capture.train_mode.custom_backward import lost_backwards
from qtk.workflow.prepare import prepare_model


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, grad):
        return grad


class Signs(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.fc = nn.Embedding(8, 4), nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, tokens):
        x = self.embedding(tokens)
        self.mean.lerp_(x.mean(0), 0.1)
        return {"hidden": [F.relu(self.fc(Sign.apply(x)))]}


TOKENS = (torch.arange(3),)


def test_a_function_is_found_without_a_gradient_anywhere_and_nothing_is_changed():
    model = Signs().requires_grad_(False).eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        assert lost_backwards(model, nn.Identity(), TOKENS, {}) == ["Sign"]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(tensor.requires_grad for tensor in model.state_dict(keep_vars=True).values())
    assert model.mean.grad_fn is None
    assert not model.training


def test_a_function_that_the_prepared_model_still_runs_is_not_lost():
    assert lost_backwards(Signs(), Signs(), TOKENS, {}) == []


def test_functions_of_torch_and_models_that_do_not_run_with_gradients_have_none():
    class Checkpointed(nn.Module):
        def forward(self, x):
            return checkpoint(torch.relu, x, use_reentrant=True)

    class Refuses(nn.Module):
        def forward(self, x):
            return torch.from_numpy(x.numpy())

    for model in (Checkpointed(), Refuses()):
        assert lost_backwards(model, nn.Identity(), (torch.randn(2, 3),), {}) == []


def test_the_report_of_a_model_names_it():
    class Binary(nn.Module):
        def forward(self, x):
            return Sign.apply(x)

    (note,) = prepare_model(Binary(), torch.randn(2, 3)).report.train_notes
    assert note.startswith("the backward of Sign is not captured")
