import copy
import functools
import warnings

import pytest
import torch
from torch import fx, nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

import qtk
from qtk.capture.holders import free_name, hold, hold_constants, holder
from qtk.errors import CaptureError
from qtk.operators.targets import attribute


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.a = self.b
        self.nothing = None
        self.register_parameter("absent", None)
        self.register_buffer("table", torch.arange(3), persistent=False)
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)


def test_holds_the_very_tensors_under_the_same_names_in_the_same_order():
    net = Net()
    held = hold(net)
    assert list(held.state_dict()) == list(net.state_dict())
    assert [name for name, _ in held.named_buffers()] == [name for name, _ in net.named_buffers()]
    assert all(a is b for a, b in zip(held.parameters(), net.parameters(), strict=True))
    assert held.a is held.b
    assert held.absent is None
    assert not held.scale.requires_grad


def test_constants_of_the_code_become_buffers_outside_the_state():
    root, graph = nn.Module(), fx.Graph()
    captured = nn.Module()
    captured.lifted = torch.ones(2)
    captured.inner = nn.Module()
    captured.inner.weight = nn.Parameter(torch.zeros(3))
    graph.output((graph.get_attr("lifted"), graph.get_attr("inner.weight")))
    hold_constants(root, fx.GraphModule(captured, graph))
    assert list(root.state_dict()) == ["inner.weight"]
    assert [name for name, _ in root.named_buffers()] == ["lifted"]


def test_names():
    root = nn.Module()
    holder(root, "a.b").leaf = 3
    assert attribute(root, "a.b.leaf") == 3
    assert free_name(root, "a.b.leaf") == "a.b.leaf_1"
    assert free_name(root, "a.c") == "a.c"
    assert free_name(root, "new") == "new"
    assert holder(root, "") is root
    assert holder(root, "qtk_members.a") is root.a


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.drop, self.gain, self.lstm = nn.Linear(4, 4), nn.Dropout(0.5), 2.0, nn.LSTM(4, 4, 2)

    def forward(self, x):
        return self.lstm(self.drop(self.fc(x)) * self.gain)[0]


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(("path", "name", "way"), [
    ("lstm", "dropout", "at capture; set 'lstm.recurrence.dropout', or set it on the original"),
    ("fc", "in_features", "at capture; set it on the original model and prepare that again"),
    ("", "gain", "at capture; set it on the original"),
    ("", "fc", "at capture; set it on the original"),
])
@pytest.mark.parametrize("made", [lambda prepared: prepared, copy.deepcopy])
def test_what_capture_has_decided_cannot_be_set(path, name, way, made):
    holder = made(qtk.prepare_model(Outer(), torch.randn(2, 4))).get_submodule(path)
    value = nn.Linear(4, 4) if name == "fc" else 0.9
    with pytest.raises(CaptureError, match=f"setting '{path + '.' if path else ''}{name}' would have no effect.*{way}"):
        setattr(holder, name, value)


@pytest.mark.medium
def test_what_acts_can_be_set():
    model, x = Outer().eval(), torch.randn(2, 4)
    prepared = copy.deepcopy(qtk.prepare_model(model, x))
    prepared.get_submodule("fc").weight = nn.Parameter(torch.zeros(4, 4))
    assert torch.equal(prepared(x), model.lstm((model.fc.bias * 2).expand(2, 4))[0])
    prepared.get_submodule("drop").p = 1.0
    zero = model.lstm(torch.zeros(2, 4))[0]
    assert torch.equal(prepared.train()(x), zero)
    prepared.my_note = "mine"
    assert prepared.my_note == "mine"


REGISTERS = (
    "register_forward_pre_hook", "register_forward_hook", "register_full_backward_pre_hook",
    "register_full_backward_hook", "register_backward_hook",
)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("register", REGISTERS)
@pytest.mark.parametrize("made", [lambda prepared: prepared, copy.deepcopy])
def test_a_hook_on_what_is_never_called_is_a_warning(made, register):
    prepared = made(qtk.prepare_model(Outer(), torch.randn(2, 4)))
    with pytest.warns(UserWarning, match=rf"{register} on 'fc': .*qtk.block_view\(sim, 'fc'\)") as seen:
        getattr(prepared.get_submodule("fc"), register)(lambda *_: None)
    assert seen[0].filename == __file__


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("path", ["", "drop"])
def test_a_hook_on_what_is_called_fires_without_a_warning(path, recwarn):
    prepared, calls = qtk.prepare_model(Outer(), torch.randn(2, 4)), []
    prepared.get_submodule(path).register_forward_hook(lambda *_: calls.append(1))
    prepared(torch.randn(2, 4))
    assert calls == [1]
    assert not [warning for warning in recwarn if "hook" in str(warning.message)]


def observe(module, args, output):
    """Looks on."""


def look_before(module, args):
    """Looks on."""


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2))).eval()


class Watcher(nn.Module):
    """A module whose method is a hook of another."""

    def see(self, module, grads, outs):
        """Looks on."""


@pytest.mark.parametrize(("path", "register", "hook", "text"), [
    ("0", "register_forward_hook", observe, "forward hook observe of 0;"),
    ("1.1", "register_forward_pre_hook", look_before, "forward pre-hook look_before of 1.1;"),
    ("1", "register_full_backward_hook", Watcher().see, "backward hook Watcher.see of 1;"),
    ("", "register_forward_hook", functools.partial(observe), "forward hook observe of the model;"),
])
def test_a_hook_that_will_not_be_called_is_named(path, register, hook, text):
    model, x = net(), torch.randn(3, 4)
    expected = model(x)
    getattr(model.get_submodule(path), register)(hook)
    with pytest.warns(UserWarning, match=f"will not be called: {text}.*qtk.block_view"):
        sim = qtk.QuantSim(model, x)
    with qtk.quantizers.modes.in_mode(sim.quantizers.values(), qtk.Mode.BYPASS):
        torch.testing.assert_close(sim.model(x), expected)


def test_many_are_counted():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(7)))
    for layer in model:
        layer.register_forward_hook(observe)
    with pytest.warns(UserWarning, match="observe of 4 and 2 more;"):
        qtk.prepare_model(model, torch.randn(2, 2))


@pytest.mark.medium
@pytest.mark.parametrize("change", [
    weight_norm, parametrizations.weight_norm, spectral_norm, parametrizations.spectral_norm,
    functools.partial(prune.l1_unstructured, name="weight", amount=0.5),
])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_computes_parameters_is_captured_without_a_warning(change):
    model, x = net(), torch.randn(3, 4)
    change(model[1][1])
    model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        prepared = qtk.prepare_model(model, x)
    assert torch.equal(prepared(x), model(x))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    torch.testing.assert_close(prepared(x), model(x))


class Half(prune.BasePruningMethod):
    """A user's own way of pruning."""

    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t, default_mask):
        mask = default_mask.clone()
        mask.view(-1)[::2] = 0
        return mask

    def __call__(self, module, args):
        super().__call__(module, args)


@pytest.mark.medium
@pytest.mark.parametrize("registered", [
    lambda hook: hook, lambda hook: hook.__call__, functools.partial,
    lambda hook: functools.partial(functools.partial(hook.__call__)),
], ids=["object", "method", "partial", "partials"])
def test_a_subclass_of_torchs_and_what_wraps_it_are_captured_too(registered):
    model, x = net(), torch.randn(3, 4)
    Half.apply(model[1][1], "weight")
    ((key, hook),) = model[1][1]._forward_pre_hooks.items()
    model[1][1]._forward_pre_hooks[key] = registered(hook)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        prepared = qtk.prepare_model(model, x)
    assert torch.equal(prepared(x), model(x))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = net(), nn.Linear(2, 2)

    def forward(self, x):
        y = self.inner(x)
        return self.outer(y) if bool((x > -9).all()) else self.outer(-y)


@pytest.mark.medium
def test_python_that_is_kept_keeps_its_hooks():
    model, calls = Branches().eval(), []
    model.register_forward_hook(lambda *_: calls.append("model"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        prepared = qtk.prepare_model(model, torch.randn(3, 4))
    calls.clear()
    prepared(torch.randn(3, 4))
    assert calls == ["model"]
    model.inner.register_forward_hook(lambda *_: calls.append("island"))
    with pytest.warns(UserWarning, match="of inner;"):
        qtk.prepare_model(model, torch.randn(3, 4))
