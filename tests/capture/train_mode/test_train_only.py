import random

import numpy as np
import pytest
import torch
from torch import nn

import qtk
from qtk.capture.train_mode.train_only import as_ops, finding_train_only

X = torch.randn(4, 8)


class Noise(nn.Module):
    def __init__(self, sigma=0.1):
        super().__init__()
        self.sigma = nn.Parameter(torch.tensor(sigma))

    def forward(self, x):
        return x + torch.randn_like(x) * self.sigma if self.training else x


class Sometimes(nn.Module):
    """Acts in half of its calls, by Python's own random numbers."""

    def forward(self, x):
        return x * 0 if self.training and random.random() < 0.5 else x


class Mixed(nn.Module):
    """Calls a child in train mode, which eval mode does not reach."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.mix(x) if self.training else x


class Writes(nn.Module):
    def forward(self, x):
        return x.mul_(2) if self.training else x


class Net(nn.Module):
    def __init__(self, *modules):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), nn.ModuleList(modules), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x)
        for module in self.inner:
            x = module(x)
        return self.last(x)


def found(model, x=X):
    with finding_train_only(model.eval()) as train_only, torch.no_grad():
        model(x)
    paths = {module: path for path, module in model.named_modules()}
    return {paths[module]: writes for module, writes in train_only.items()}


@pytest.mark.parametrize("module", [
    nn.Dropout(0.5), nn.Dropout(0.0), nn.AlphaDropout(0.1), nn.FeatureAlphaDropout(0.1), Noise(), Sometimes(), Mixed(),
], ids=lambda module: type(module).__name__)
def test_what_hands_on_its_input_in_eval_mode_alone_is_found(module):
    assert found(Net(module)) == {"inner.0": False}


def test_what_writes_into_its_input_is_found_to():
    assert found(Net(Writes(), nn.Dropout(0.5, inplace=True), nn.Dropout(0.0, inplace=True))) == {
        "inner.0": True, "inner.1": True, "inner.2": True,
    }


@pytest.mark.parametrize("module", [
    nn.Identity(), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Sequential(nn.Identity()),
], ids=lambda module: type(module).__name__)
def test_others_are_not(module):
    assert found(Net(module)) == {}


def test_of_a_container_its_members_are():
    assert found(Net(nn.Sequential(nn.Dropout(0.5), Noise()))) == {"inner.0.0": False, "inner.0.1": False}


def test_one_that_does_nothing_now_is_found_with_others_of_its_class():
    class Depth(nn.Module):
        def __init__(self, p):
            super().__init__()
            self.p = p

        def forward(self, x):
            return x * (torch.rand(len(x), 1) > self.p) / (1 - self.p) if self.training and self.p else x

    assert found(Net(Depth(0.0), Depth(0.5))) == {"inner.0": False, "inner.1": False}
    assert found(Net(Depth(0.0))) == {}


def test_what_is_called_with_more_than_a_tensor_is_not():
    class Two(nn.Module):
        def forward(self, x, p):
            return x * p if self.training else x

    class Calls(nn.Module):
        def __init__(self):
            super().__init__()
            self.two = Two()

        def forward(self, x):
            return self.two(x, 0.5)

    assert found(Net(Calls())) == {}


def test_finding_leaves_model_buffers_and_random_numbers_alone():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            if not self.training:
                return x
            self.calls += 1
            return x + torch.randn_like(x)

    model = Net(Counts(), Noise(), nn.Dropout(0.5)).eval()
    torch.manual_seed(3)
    expected, state = torch.randn(3), random.getstate()
    torch.manual_seed(3)
    assert set(found(model)) == {"inner.0", "inner.1", "inner.2"}
    assert torch.equal(torch.randn(3), expected)
    assert random.getstate() == state
    assert float(model.inner[0].calls) == 0
    assert not any(module.training or module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_finding_leaves_the_random_numbers_of_python_alone():
    state = random.getstate()
    found(Net(Sometimes()))
    assert random.getstate() == state


def test_calls_are_ops_in_the_body_alone():
    model = Net(Noise(), nn.Dropout(0.5)).eval()
    with as_ops(model, {model.inner[0]: False, model.inner[1]: True}):
        program = torch.export.export(model, (X,))
    names = [str(node.target) for node in program.graph.nodes if "captured_module" in str(node.target)]
    assert names == ["qtk.captured_module.default", "qtk.captured_module_.default"]
    assert not any("forward" in vars(module) for module in model.modules())
    assert model(X) is not None


def test_readers_after_a_module_that_writes_see_what_it_wrote():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.writes = nn.Linear(8, 8), Writes()

        def forward(self, x):
            x = self.fc(x)
            y = self.writes(x)
            return x + y

    model = Reads()
    prepared = qtk.prepare_model(model, X)
    assert prepared.report.train_notes == ()
    assert torch.equal(prepared.train()(X), model.train()(X))
    assert torch.equal(prepared.eval()(X), model.eval()(X))


def test_children_that_run_in_train_mode_alone_keep_their_parameters():
    model = Net(Mixed())
    prepared = qtk.prepare_model(model, X)
    assert list(prepared.state_dict()) == list(model.state_dict())
    assert torch.equal(prepared.train()(X), model.train()(X))
    prepared(X).sum().backward()
    assert model.inner[0].mix.weight.grad is not None


class Given(nn.Module):
    """Does what functions say, in eval mode and in train mode."""

    def __init__(self, train, evaluate=lambda x: x):
        super().__init__()
        self.train_mode, self.eval_mode = train, evaluate

    def forward(self, x):
        return self.train_mode(x) if self.training else self.eval_mode(x)


def raises(error):
    def raising(x):
        raise error
    return raising


def test_one_that_seldom_acts_is_tried_more_than_once():
    seldom = Given(lambda x: x + 1 if torch.rand(()) < 0.1 else x)
    assert found(Net(seldom)) == {"inner.0": False}


@pytest.mark.parametrize("train", [
    lambda x: x[:2], lambda x: x.double(), lambda x: (x + 1, x), lambda x: x, raises(ValueError("only with labels")),
], ids=["shape", "dtype", "tuple", "nothing", "raises"])
def test_what_returns_something_else_in_train_mode_or_nothing_new_is_not_found(train):
    assert found(Net(Given(train))) == {}


def test_a_lack_of_memory_is_no_verdict_and_the_hooks_are_gone_all_the_same():
    model = Net(Given(raises(torch.OutOfMemoryError("planted"))))
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        found(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_what_hands_on_its_input_in_one_of_its_calls_only_is_not_found():
    class Twice(Net):
        def forward(self, x):
            return self.inner[0](self.inner[0](self.first(x)))

    for first in (True, False):
        calls = []
        alternating = Given(torch.zeros_like, lambda x, calls=calls, first=first: (
            calls.append(1), x if (len(calls) == 1) is first else x + 0)[1])
        assert found(Twice(alternating)) == {}


def test_one_that_is_in_train_mode_already_or_called_by_name_is_not_found():
    class Named(Net):
        def forward(self, x):
            return self.inner[0](x=x)

    class Flagged(nn.Module):
        def forward(self, x, flag=False):
            return x + 1 if self.training else x

    class Flags(Net):
        def forward(self, x):
            return self.inner[0](x, flag=True)

    calls = []
    assert found(Named(Noise())) == found(Flags(Flagged())) == {}
    model = Net(Given(lambda x: (calls.append(1), x if len(calls) == 1 else x + 1)[1])).eval()
    model.inner[0].train()
    with finding_train_only(model) as train_only, torch.no_grad():
        model(X)
    assert train_only == {}


def test_a_call_that_raises_and_is_caught_hides_no_other():
    class Catches(Net):
        def forward(self, x):
            try:
                self.inner[0](x)
            except ValueError:
                return self.last(self.inner[1](x))

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = Given(torch.zeros_like, raises(ValueError("planted")))

        def forward(self, x):
            return self.inside(x)

    class Tries(Around):
        def forward(self, x):
            try:
                return super().forward(x)
            except ValueError:
                return x + 1 if self.training else x

    assert found(Catches(Around(), Noise())) == {"inner.1": False}
    assert found(Net(Tries())) == {}


def test_tensors_of_inference_mode_are_passed_over():
    model = Net(Noise()).eval()
    with torch.inference_mode(), finding_train_only(model) as train_only:
        model(torch.randn(4, 8))
    assert train_only == {}


def test_finding_leaves_the_random_numbers_of_numpy_alone():
    before = np.random.get_state()[1].copy()
    assert found(Net(Given(lambda x: x + float(np.random.rand())))) == {"inner.0": False}
    assert (np.random.get_state()[1] == before).all()


def test_scripted_modules_are_passed_over():
    assert found(Net(torch.jit.script(nn.Dropout(0.5)), nn.Dropout(0.5))) == {"inner.1": False}


def test_a_forward_of_an_instance_comes_back():
    model = Net(Noise(), Noise()).eval()
    own = model.inner[0].forward = lambda x: x * 2
    with as_ops(model, dict.fromkeys(model.inner, False)):
        assert model.inner[0].forward is not own
    assert model.inner[0].forward is own
    assert "forward" not in vars(model.inner[1])
    with as_ops(model.inner[0], {model.inner[0]: False}):  # what is captured by itself runs
        assert model.inner[0].forward is own


def test_a_dropout_of_torch_that_drops_nothing_is_not_tried(monkeypatch):
    runs, forward = [], nn.Dropout.forward
    monkeypatch.setattr(nn.Dropout, "forward", lambda self, x: runs.append(self.p) or forward(self, x))
    assert found(Net(nn.Dropout(0.0), nn.Dropout(0.5))) == {"inner.0": False, "inner.1": False}
    assert runs == [0.0, 0.5, 0.5]  # in eval mode each, and one in train mode
