"""Against running the whole model anew for every layer, with torch's own interpreter."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import qtk
from qtk.calls.calls import Call
from qtk.calls.token_masks import TokenMasks
from qtk.errors import CalibrationError, InternalError
from qtk.layerwise.walk import walk
from qtk.layerwise.weighted_layers import weighted_layers
from qtk.moments.second_moments import SecondMoments
from qtk.numerics.im2col import im2col, weight_to_gemm
from qtk.numerics.token_layout import TokenLayout
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode
from tests.layerwise.branches import EXACT, Branches, prepared


class Watched(fx.Interpreter):
    """What the op that reads the weight of each layer is called with."""

    def __init__(self, module):
        super().__init__(module)
        self.inputs: dict[str, list[torch.Tensor]] = {}

    def run_node(self, n):
        for read in n.all_input_nodes[1:]:
            if read.op == "call_module" and n.op == "call_function":
                own = self.fetch_args_kwargs_from_env(n)[0][0]
                self.inputs.setdefault(str(read.target).removeprefix("qtk_quantizers."), []).append(own)
        return super().run_node(n)


def inputs_of(sim, batch, mode):
    watched = Watched(sim.model)
    with torch.no_grad(), in_mode(sim.quantizers.values(), mode):
        watched.run(batch)
    return watched.inputs


def rows(layer, inputs):
    return torch.cat([im2col(x.double(), layer.geometry) for x in inputs], 1)


def damage(layer):
    """What no method would do, so that the walk cannot but notice."""
    with torch.no_grad():
        layer.weight.mul_(0.7)
        if layer.bias is not None:
            layer.bias.add_(0.1)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("offload", ["none", "cpu", "disk"])
@pytest.mark.parametrize("inputs", ["asym", "symfp", "symqt"])
def test_every_layer_sees_what_it_would_see_in_a_run_of_the_whole_model(inputs, offload):
    sim, batches, calls, layers = prepared()
    original = [inputs_of(sim, batch, Mode.BYPASS) for batch in batches]
    seen = []
    for reached in walk(sim.model, calls, dict.fromkeys(layers, EXACT), inputs=inputs, offload=offload):
        layer, moments = reached.layer, reached.moments
        seen.append(layer.name)
        present = [inputs_of(sim, batch, Mode.SIMULATE) for batch in batches]
        float_rows = rows(layer, [x for own in original for x in own[layer.name]])
        quantized_rows = rows(layer, [x for own in present for x in own[layer.name]])
        own = float_rows if inputs == "symfp" else quantized_rows
        torch.testing.assert_close(moments.gram[:, 0], own.mT @ own, rtol=1e-5, atol=1e-5)
        if inputs == "asym":
            cross = (float_rows - quantized_rows).mT @ quantized_rows
            weight = weight_to_gemm(layer.weight.detach().double(), layer.geometry)
            torch.testing.assert_close(moments.linear(weight), weight @ cross, rtol=1e-4, atol=1e-4)
        else:
            assert not moments.has_two_inputs
        damage(layer)
    assert seen == [f"{name}.weight" for name in ("stem", "depthwise", "up", "q", "k", "v", "mlp", "head")]


@pytest.mark.medium
def test_the_float_path_keeps_the_weights_it_had():
    sim, batches, calls, layers = prepared(activation_bits=None)  # else the output has a quantizer behind the last op
    with torch.no_grad():
        expected = torch.cat([sim.model(batch) for batch in batches])
        with in_mode(sim.quantizers.values(), Mode.BYPASS):
            original = torch.cat([sim.model(batch) for batch in batches])
    last = [(reached, damage(reached.layer)) for reached in walk(sim.model, calls, dict.fromkeys(layers, EXACT))][-1][0]
    with torch.no_grad():
        damaged = torch.cat([sim.model(batch) for batch in batches])
    assert not torch.allclose(damaged, expected)
    assert last.output.signal == pytest.approx(float(original.square().sum()), rel=1e-5)
    assert last.output.noise == pytest.approx(float((original - damaged).square().sum()), rel=1e-4)


@pytest.mark.medium
def test_a_layer_used_twice_is_decided_at_its_last_use_by_all_its_inputs():
    sim, batches, calls, layers = prepared(Branches(twice=True).eval())
    for reached in walk(sim.model, calls, dict.fromkeys(layers, EXACT), inputs="symqt"):
        if reached.layer.name == "mlp.weight":
            present = [inputs_of(sim, batch, Mode.SIMULATE)["mlp.weight"] for batch in batches]
            assert [len(uses) for uses in present] == [2, 2, 2]
            own = rows(reached.layer, [x for uses in present for x in uses])
            torch.testing.assert_close(reached.moments.gram[:, 0], own.mT @ own, rtol=1e-5, atol=1e-5)
            return
        damage(reached.layer)
    pytest.fail("the layer was not reached")


class Counter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(("inputs", "passes"), [("asym", 2), ("symfp", 1), ("symqt", 1)])
def test_the_cost_is_two_forward_passes(inputs, passes):
    sim, batches, calls, layers = prepared()
    with Counter() as once, torch.no_grad():
        sim.model(batches[0])
    with Counter() as walked:
        for _ in walk(sim.model, calls, dict.fromkeys(layers), inputs=inputs):
            pass
    for name in ("convolution", "gelu", "_softmax"):
        # the paths part behind the first quantizer, and nothing behind the last layer need run
        assert walked.counts[name] <= passes * len(calls) * once.counts[name]
    assert walked.counts["gelu"] == passes * len(calls)


@pytest.mark.medium
def test_layers_that_are_not_wanted_are_run_like_everything_else():
    sim, batches, calls, layers = prepared()
    chosen = [layer for layer in layers if layer.name in ("q.weight", "head.weight")]
    found = {reached.layer.name: reached.moments for reached in walk(sim.model, calls, dict.fromkeys(chosen, EXACT))}
    assert list(found) == ["q.weight", "head.weight"]
    present = [inputs_of(sim, batch, Mode.SIMULATE) for batch in batches]
    own = rows(chosen[1], [x for each in present for x in each["head.weight"]])
    torch.testing.assert_close(found["head.weight"].gram[:, 0], own.mT @ own, rtol=1e-5, atol=1e-5)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(4, 2)

    def forward(self, a, b):
        return self.first(a["x"]) + self.second(b)


def test_named_inputs_in_any_order():
    torch.manual_seed(0)
    a, b = {"x": torch.randn(5, 3), "y": torch.randn(5, 1)}, torch.randn(5, 4)
    sim = qtk.QuantSim(Named().eval(), {"a": a, "b": b}, activation_bits=None)
    sim.compute_encodings(None, progress=False)
    layers, _ = weighted_layers(sim.model, sim.plan)
    turned = Call((), {"b": b, "a": {"y": a["y"], "x": a["x"]}}, None)
    found = {r.layer.name: r.moments for r in walk(sim.model, [turned], dict.fromkeys(layers, EXACT))}
    for name, x in (("first.weight", a["x"]), ("second.weight", b)):
        torch.testing.assert_close(found[name].gram[0, 0], (x.mT @ x).double(), rtol=1e-5, atol=1e-5)


class Narrow(nn.Module):
    """Few outputs, used twice."""

    def __init__(self):
        super().__init__()
        self.first, self.narrow = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        y = torch.relu(self.first(x))
        return self.narrow(y) + self.narrow(y.flip(0).tanh())


@pytest.mark.medium
def test_a_narrow_layer_used_twice():
    torch.manual_seed(0)
    batches = [torch.randn(6, 8)]
    sim, _, calls, layers = prepared(Narrow().eval(), batches)
    for reached in walk(sim.model, calls, dict.fromkeys(layers, EXACT)):
        if reached.layer.name == "narrow.weight":
            original, present = (
                rows(reached.layer, inputs_of(sim, batches[0], mode)["narrow.weight"])
                for mode in (Mode.BYPASS, Mode.SIMULATE)
            )
            weight = weight_to_gemm(reached.layer.weight.detach().double(), reached.layer.geometry)
            expected = weight @ (original - present).mT @ present
            torch.testing.assert_close(reached.moments.linear(weight), expected, rtol=1e-4, atol=1e-4)
            return
    pytest.fail("the layer was not reached")


@pytest.mark.medium
def test_what_is_not_finite_is_refused():
    sim, batches, _, layers = prepared()
    broken = [Call((torch.full_like(batches[0], torch.inf),), {}, None)]
    with pytest.raises(CalibrationError, match="NaN or infinity"):
        list(walk(sim.model, broken, dict.fromkeys(layers, EXACT)))


def test_a_mistake_of_qtk_is_not_blamed_on_the_data(monkeypatch):
    def observe(self, quantized, float_input):
        return {}["gram"]

    sim = qtk.QuantSim(nn.Linear(4, 2), torch.ones(2, 4))
    data = [torch.ones(2, 4)]
    sim.compute_encodings(data, progress=False)
    monkeypatch.setattr(SecondMoments, "_observe", observe)
    monkeypatch.setitem(globals(), "__name__", "qtk.somewhere")
    with pytest.raises(InternalError, match="KeyError: 'gram'; this is a defect of qtk"):
        qtk.apply_gptq(sim, data, progress=False)


@pytest.mark.parametrize("error", [MemoryError("full"), torch.OutOfMemoryError("CUDA out of memory")])
def test_too_little_memory_keeps_its_own_error(monkeypatch, error):
    def observe(self, quantized, float_input):
        raise error

    sim = qtk.QuantSim(nn.Linear(4, 2), torch.ones(2, 4))
    data = [torch.ones(2, 4)]
    sim.compute_encodings(data, progress=False)
    monkeypatch.setattr(SecondMoments, "_observe", observe)
    with pytest.raises(type(error)) as caught:
        qtk.apply_gptq(sim, data, progress=False)
    assert caught.value is error


@pytest.mark.parametrize("lengths", ["mask of another length", "lengths that do not fit"])
def test_layers_that_see_all_rows_of_some_batches_are_named(monkeypatch, lengths):
    x, mask = torch.randn(2, 5, 4), torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    sim = qtk.QuantSim(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), x)
    sim.compute_encodings([x], progress=False)
    layers = weighted_layers(sim.model, sim.plan)[0]
    calls = [Call((x,), {}, None, valid=TokenMasks.of(mask)), Call((x,), {}, None, valid=TokenMasks.of(mask))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        followed = [layer_input.moments.rows for layer_input in walk(sim.model, calls, dict.fromkeys(layers, EXACT))]
    assert followed == [16, 16]
    if lengths == "mask of another length":
        calls[1] = Call((x,), {}, None, valid=TokenMasks.of(mask[:, :4]))
    else:
        monkeypatch.setattr(TokenLayout, "rows", lambda self, value, valid: None)
    with pytest.warns(UserWarning, match=r"in some batches .* the inputs of 2 layers.*: 0\.weight, 2\.weight"):
        list(walk(sim.model, calls, dict.fromkeys(layers, EXACT)))


class Gated(nn.Module):
    """A second layer for the rows alone that the first one decides about."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        hidden = self.first(x)
        rows = (hidden[:, 0] > 0).nonzero()[:, 0]
        return x.index_add(0, rows, self.second(hidden[rows]))


@pytest.mark.medium
def test_rows_that_both_paths_choose_otherwise_count_as_the_quantized_path_has_them():
    torch.manual_seed(0)
    model, data = Gated().eval(), [torch.randn(64, 8) for _ in range(3)]
    sim = qtk.QuantSim(model, data[0], weight_bits=2, activation_bits=None)
    sim.compute_encodings(data, progress=False)
    report = qtk.apply_gptq(sim, data, progress=False)
    rounded = sim.quantizers["first.weight"](sim.model.get_parameter("first.weight"))
    counts = [[int((F.linear(x, weight, model.first.bias)[:, 0] > 0).sum()) for x in data]
              for weight in (model.first.weight, rounded)]
    assert counts[0] != counts[1]
    assert [result.reason for result in report.layers] == [None, None]
    assert report.layers[1].after <= report.layers[1].before
