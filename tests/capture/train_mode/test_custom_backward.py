import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from qtk.capture.train_mode.custom_backward import lost_backwards, noting_custom_functions
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


def test_no_value_of_an_inner_layer_is_kept_for_a_backward_pass():
    alive: list[int] = []

    class Layers(nn.Module):
        def forward(self, x):
            storages = []
            for _ in range(8):
                x = Sign.apply(x).exp()
                storages.append(StorageWeakRef(x.untyped_storage()))
            alive.append(sum(not storage.expired() for storage in storages))
            return x

    assert lost_backwards(Layers(), nn.Identity(), (torch.randn(3),), {}) == ["Sign"]
    assert alive == [1]
    Layers()(torch.randn(3, requires_grad=True))
    assert alive == [1, 8]  # a run with a backward pass needs them


def test_a_function_of_a_model_that_differentiates_in_its_forward_is_found():
    class Force(nn.Module):
        def forward(self, x):
            x = x.requires_grad_()
            return torch.autograd.grad((Sign.apply(x) * x).square().sum(), x, create_graph=True)[0] + Sign.apply(x)

    assert lost_backwards(Force(), nn.Identity(), (torch.randn(3),), {}) == ["Sign"]


def test_the_report_of_a_model_names_it():
    class Binary(nn.Module):
        def forward(self, x):
            return Sign.apply(x)

    (note,) = prepare_model(Binary(), torch.randn(2, 3)).report.train_notes
    assert note.startswith("the backward of Sign is not captured")


def test_only_a_model_that_runs_one_is_run_with_gradients():
    held, modes = Sign.apply, []  # as users hold it, from before

    class Model(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def forward(self, x):
            if not torch.compiler.is_exporting():
                modes.append(torch.is_grad_enabled())
            return self.function(x)

    assert prepare_model(Model(torch.sign), torch.randn(2, 3)).report.train_notes == ()
    assert not any(modes)
    (note,) = prepare_model(Model(held), torch.randn(2, 3)).report.train_notes
    assert note.startswith("the backward of Sign is not captured")
    assert any(modes)


def test_functions_are_noted_as_they_run_and_stay_what_they_were():
    class Scaled(Sign):  # whose forward is another's
        pass

    class Untouched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x

    forward, x = vars(Sign)["forward"], torch.randn(3)
    with noting_custom_functions() as names:
        assert torch.equal(Scaled.apply(x), x.sign())
    assert names == {"Sign"}
    assert vars(Sign)["forward"] is forward
    assert "forward" not in vars(Scaled)
    assert torch.equal(Untouched.apply(x), x)
