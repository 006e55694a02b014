import copy

import pytest
import torch
from torch import nn

import qtk
from qtk.capture.prepared_model import PreparedGraph
from qtk.capture.restored import noting_changes, restored


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.bn = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.last = "before"

    def forward(self, x):
        self.last = self.bn(self.fc(x))
        return self.last + torch.rand(1)


def test_everything_is_as_it_was():
    torch.manual_seed(0)
    model = Net()
    model.bn.eval()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    weight, random = model.fc.weight, torch.get_rng_state()
    with restored(model):
        model.train()(torch.randn(3, 2))
        model.new = 3
        model.fc.weight = nn.Parameter(torch.zeros(2, 2))
        del model.bn.bias
        model.extra = nn.Linear(1, 1)
        model.fc.register_forward_hook(lambda *_: None)
    assert model.last == "before"
    assert not hasattr(model, "new")
    assert model.fc.weight is weight
    assert [name for name, _ in model.named_children()] == ["fc", "bn"]
    assert model.training
    assert not model.bn.training
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert list(state) == list(model.state_dict())
    assert torch.equal(torch.get_rng_state(), random)
    assert model(torch.randn(3, 2)).shape == (3, 2)


def test_also_after_an_error():
    model = Net()

    def fail():
        model.bn.running_mean += 1
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), restored(model):
        fail()
    assert float(model.bn.running_mean.abs().max()) == 0


def test_lists_and_dicts_get_their_items_back():
    class Collects(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen, self.named = ["first"], {"a": 1}

        def forward(self, x):
            self.seen.append(x)
            self.named["x"] = x
            del self.named["a"]
            return x

    model = Collects()
    seen, named = model.seen, model.named
    with restored(model):
        model(torch.ones(1))
    assert model.seen is seen
    assert model.named is named
    assert (seen, named) == (["first"], {"a": 1})


def test_scripted_modules_keep_their_mode():
    model = nn.Sequential(torch.jit.script(nn.Dropout()), torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2)))
    with restored(model):
        model.eval()(torch.ones(1, 2))
    assert model[0].training


def test_tensors_that_are_attributes_get_their_values_back():
    model = nn.Linear(2, 2)
    model.sum = torch.zeros(2)
    with restored(model):
        model.sum += 1
    assert float(model.sum.sum()) == 0


X = torch.ones(1, 3)


class Keeps(nn.Module):
    """Its attributes change by the call: a number, a tensor in place, one in a list, and one that is only shown."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.calls, self.sum, self.held, self.shown = 0, torch.zeros(1, 3), [torch.zeros(1, 3)], None

    def forward(self, x):
        self.calls += 1
        self.sum.add_(x)
        self.held[0] = self.held[0] + x
        self.shown = self.linear(x)
        return self.shown + self.calls + self.sum + self.held[0]


class Shows(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.shown = None

    def forward(self, x):
        self.shown = self.linear(x)
        return self.shown.relu()


def test_what_changed_is_named():
    model = nn.Sequential(Keeps())
    changed = noting_changes(model)
    assert changed() == ()
    model(X)
    assert changed() == ("0.calls", "0.sum", "0.held", "0.shown")


@pytest.mark.medium
def test_a_state_in_no_buffer_keeps_its_python_with_the_way_out_and_is_right_call_after_call():
    model = Keeps().eval()
    prepared = qtk.prepare_model(copy.deepcopy(model), X)
    reason = prepared.report.parts[0].reason
    assert not isinstance(prepared, PreparedGraph)
    assert "is mutated in the forward" in reason or "forward keeps" in reason
    for _ in range(3):
        assert torch.allclose(model(X), prepared(X))


def test_the_reason_names_the_attribute_and_the_buffer_to_make():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.calls = nn.Linear(3, 3), 0

        def forward(self, x):
            self.calls += 1
            return self.linear(x) * self.calls

    (reason,) = [part.reason for part in qtk.prepare_model(Counts().eval(), X).report.parts if part.path == ""]
    assert "forward keeps calls from call to call" in reason
    assert "self.register_buffer('calls', " in reason


def test_an_attribute_that_no_later_call_reads_is_no_state():
    assert isinstance(qtk.prepare_model(Shows().eval(), X), PreparedGraph)


class Hooks(nn.Module):
    """Installs a hook at its first call, as transformers does to collect hidden states."""

    def __init__(self):
        super().__init__()
        self.linear, self.is_installed, self.seen = nn.Linear(3, 3), False, []

    def forward(self, x):
        if not self.is_installed:
            self.linear.register_forward_hook(lambda module, args, output: self.seen.append(output))
            self.is_installed = True
        self.seen.clear()
        return self.linear(x), len(self.seen)


def test_hooks_of_a_first_call_are_installed_once():
    model, x = Hooks().eval(), torch.randn(2, 3)
    with restored(model):
        model(x)
    assert not model.linear._forward_hooks
    qtk.prepare_model(model, x)
    assert [model(x)[1] for _ in range(2)] == [1, 1]
