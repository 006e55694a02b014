import copy

import pytest
import torch
from torch import nn

import qtk
from qtk.core.site import Site
from qtk.graph.insert import remove
from qtk.graph.sites import OP, OWNER, add_labels, label, value_site
from qtk.transforms.channel_scale_step import InsertChannelScale, free_op
from qtk.transforms.snapshot import Snapshot
from qtk.transforms.steps import ScaleParameter, make


class Mlp(nn.Module):
    def __init__(self, bias=True):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3, bias=bias)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class TwoReaders(nn.Module):
    """Two layers and an addition read one value."""

    def __init__(self):
        super().__init__()
        self.first, self.act, self.a, self.b = nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.act(self.first(x))
        return self.a(h) * self.b(h) + h


NUMBERS = torch.tensor([0.5, 2.0, 1.0, 4.0, 0.25, 1.0], dtype=torch.float64)


def steps_for(*layers, numbers=NUMBERS):
    sites = tuple(Site(layer, "", "out") for layer in layers)
    weights = [ScaleParameter(f"{layer}.weight", 1 / numbers[None]) for layer in layers]
    return [InsertChannelScale(sites, -1, f"{layers[0]}.smooth_scale", f"{layers[0]}.weight", numbers), *weights]


def prepared_mlp():
    torch.manual_seed(0)
    return qtk.prepare_model(Mlp().eval(), torch.randn(5, 4))


def test_the_function_stays():
    model, x = prepared_mlp(), torch.randn(7, 4)
    before, weight = model(x), model.get_parameter("fc2.weight").clone()
    make(model, steps_for("fc2"))
    assert torch.allclose(model(x), before, atol=1e-6)
    assert torch.equal(model.get_parameter("fc2.weight"), (weight / NUMBERS).float())
    assert torch.equal(model.get_buffer("fc2.smooth_scale"), NUMBERS.float())


@pytest.mark.medium
def test_the_buffer_is_in_the_state_dict_and_follows_the_dtype():
    model = prepared_mlp()
    make(model, steps_for("fc2"))
    assert "fc2.smooth_scale" in model.state_dict()
    assert model.double()(torch.randn(2, 4, dtype=torch.float64)).dtype == torch.float64
    double = qtk.prepare_model(Mlp().eval().double(), torch.randn(5, 4, dtype=torch.float64))
    make(double, steps_for("fc2"))
    assert double.get_buffer("fc2.smooth_scale").dtype == torch.float64


def test_its_value_has_a_site_of_its_own():
    model = prepared_mlp()
    make(model, steps_for("fc2"))
    names = [value_site(node).name for node in model.graph.nodes if node.op in ("call_function", "call_module")]
    assert names == ["fc1:out", "act:out", "fc2.channel_scale:out", "fc2:out"]


def test_the_name_is_free_inside_its_module_whatever_others_hold():
    model = prepared_mlp()
    first, second, *_ = (node for node in model.graph.nodes if label(node, OWNER))
    owners = [label(node, OWNER) for node in (first, second)]
    add_labels(first, **{OP: "channel_scale"})
    assert owners[0] != owners[1]
    assert [free_op(model, owner) for owner in owners] == ["channel_scale_1", "channel_scale"]


def test_once_for_all_its_readers():
    torch.manual_seed(0)
    model, x = qtk.prepare_model(TwoReaders().eval(), torch.randn(5, 4)), torch.randn(3, 4)
    before = model(x)
    make(model, steps_for("a", "b", numbers=NUMBERS[:4]))
    assert torch.allclose(model(x), before, atol=1e-6)
    assert [node.target for node in model.graph.nodes if node.op == "call_module"].count("a.channel_scale") == 1
    assert not [name for name in model.state_dict() if name.startswith("b.smooth")]


def test_a_snapshot_takes_it_back():
    model, x = prepared_mlp(), torch.randn(7, 4)
    before, code, names = model(x), model.code, list(model.state_dict())
    snapshot = Snapshot(model)
    make(model, steps_for("fc2"))
    snapshot.restore()
    assert (model.code, list(model.state_dict())) == (code, names)
    assert torch.equal(model(x), before)


@pytest.mark.parametrize("config", ["default", "onnxruntime"])
def test_the_value_is_rounded_only_after_the_multiplication(config):
    model = prepared_mlp()
    make(model, steps_for("fc2"))
    sim = qtk.QuantSim(model, torch.randn(5, 4), config=config)
    assert Site("act", "", "out") not in sim.plan
    assert sim.plan.unquantized[Site("act", "", "out")] == "scaled per channel first"
    assert sim.plan.unquantized[Site("fc1", "", "out")].startswith("inside supergroup linear → gelu")
    assert Site("fc2", "channel_scale", "out") in sim.plan
    assert Site("fc2", "smooth_scale", "") not in sim.plan


def test_other_readers_get_the_rounded_value_the_scale_the_unrounded_one():
    torch.manual_seed(0)
    example = torch.randn(64, 4)
    model = qtk.prepare_model(TwoReaders().eval(), example)
    make(model, steps_for("a", "b", numbers=NUMBERS[:4]))
    code = model.code
    sim = qtk.QuantSim(model, example)
    sim.compute_encodings([example], progress=False)
    seen = {}
    for name in ("act:out", "a.channel_scale:out"):
        sim.quantizers[name].register_forward_hook(lambda m, args, out, name=name: seen.update({name: (args[0], out)}))
    with torch.no_grad():
        sim.model(example)
    unrounded, rounded = seen["act:out"]
    assert not torch.equal(unrounded, rounded)
    assert torch.equal(seen["a.channel_scale:out"][0], unrounded * NUMBERS[:4].float())
    remove(sim.model)
    assert sim.model.code == code


def test_rules_name_it():
    model = prepared_mlp()
    make(model, steps_for("fc2"))
    config = {"version": 1, "extends": "default",
              "rules": [{"match": {"op": "channel_scale"}, "output": {"bits": 16}}]}
    sim = qtk.QuantSim(model, torch.randn(5, 4), config=config)
    assert sim.quantizers["fc2.channel_scale:out"].spec.dtype.bits == 16


def test_a_copy_is_separate():
    model = prepared_mlp()
    make(model, steps_for("fc2"))
    twin = copy.deepcopy(model)
    twin.get_buffer("fc2.smooth_scale").zero_()
    assert model.get_buffer("fc2.smooth_scale").ne(0).all()


