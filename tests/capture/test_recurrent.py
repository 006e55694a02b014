"""Recurrent nets, prepared and simulated: torch's own while asleep, a quantizer on every inner value while awake."""

import copy
import functools
import itertools

import pytest
import torch
from torch import nn

import qtk
from qtk.core.granularity import PerChannel
from qtk.nn.recurrent import Recurrent
from qtk.quantizers.modes import in_mode
from tests.capture.recurrent_nets import OPTIONS, Cell, H, I, N, Net, P, T, case, simulated
from tests.zoo.packed import ToTotalLength, sequences

CASES = [
    (kind, option) for kind, option in itertools.product((nn.LSTM, nn.GRU, nn.RNN), OPTIONS)
    if option != "projected" or kind is nn.LSTM
] + [(functools.partial(nn.RNN, nonlinearity="relu"), "plain")]
QUICK = [
    (nn.LSTM, "plain"), (nn.LSTM, "both_ways"), (nn.LSTM, "projected"), (nn.GRU, "two_layers"),
    (nn.GRU, "without_bias"), (nn.RNN, "both_ways"), CASES[-1],
]  # each net and each option
every_case = pytest.mark.parametrize(("kind", "option"), [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES
])


def flat(result):
    return [tensor for value in result for tensor in flat(value)] if isinstance(result, tuple) else [result]


def run(model, inputs):
    with torch.no_grad():
        return flat(model(*inputs) if isinstance(inputs, tuple) else model(inputs))


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def assert_near_float(expected, found):
    """50 dB apart at the least."""
    for a, b in zip(expected, found, strict=True):
        assert float((a - b).double().square().sum()) < 1e-5 * float(a.double().square().sum())


def fused_calls(model):
    """How often each recurrence below ``model`` runs torch's kernel and how often its own loop, from here on."""
    counts = {"cell": 0, "composite": 0}

    def count(name):
        return lambda *_: counts.__setitem__(name, counts[name] + 1)

    for path, module in model.named_modules():
        if isinstance(module, Recurrent):
            module.register_forward_hook(count("composite"))
        if path.endswith((".cell", ".projection")):
            module.register_forward_hook(count("cell"))
    return counts


@pytest.mark.sample(1)
@pytest.mark.medium
@every_case
def test_bypassed_is_torchs_net_bit_for_bit_and_16_bits_are_near_it(kind, option):
    model, prepared, x = case(kind, option)
    expected = run(model, x)
    assert same(expected, run(prepared, x))
    sim = simulated(prepared, x, 16)
    found = run(sim.model, x)
    assert not same(expected, found)
    assert_near_float(expected, found)
    with in_mode(sim.quantizers.values(), qtk.Mode.BYPASS):
        assert same(expected, run(sim.model, x))


@pytest.mark.sample(3)
@pytest.mark.medium
@every_case
def test_gradients_of_the_prepared_net_are_torchs(kind, option):
    model, prepared, x = case(kind, option)
    gradients = []
    for module in (model, prepared):
        own = dict(module.named_parameters())
        outputs = flat(module(x))
        total = sum((value * torch.linspace(-1, 1, value.numel()).view_as(value)).sum() for value in outputs)
        gradients.append(torch.autograd.grad(total, [own[name] for name, _ in model.named_parameters()]))
    assert same(*gradients)


@pytest.mark.sample(3)
@pytest.mark.medium
@every_case
def test_every_weight_is_quantized_per_channel_and_every_step_hands_out_codes(kind, option):
    model, prepared, x = case(kind, option)
    sim = simulated(prepared, x)
    decided = {site.name: plan for site, plan in sim.plan.items()}
    for name, parameter in model.named_parameters():
        assert (name in decided) == (parameter.ndim == 2)
        assert parameter.ndim == 1 or decided[name].spec.granularity == PerChannel(0)
    encodings, output = sim.encodings(), run(sim.model, x)[0]
    width = P if option == "projected" else H
    for step, part in zip(steps(model.rnn)[-(1 + model.rnn.bidirectional):], output.split(width, -1), strict=True):
        last = "output_projection" if option == "projected" else "hidden"
        encoding = encodings[f"rnn.{step}.cell.{last}:out"]
        codes = part.double() / float(encoding.scale)
        assert float((codes - codes.round()).abs().max()) < 1e-3


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(("kind", "option"), [(nn.LSTM, "both_ways"), (nn.LSTM, "projected"), (nn.GRU, "without_bias")])
def test_both_directions_of_a_layer_share_the_encoding_of_what_they_hand_out(kind, option):
    model, prepared, x = case(kind, option)
    sim = simulated(prepared, x)
    last = "output_projection" if option == "projected" else "hidden"
    for layer in range(model.rnn.num_layers):
        forth, back = (f"rnn.l{layer}{direction}.cell.{last}:out" for direction in ("", "_reverse"))
        assert sim.quantizers[forth] is sim.quantizers[back]
    output, largest = run(prepared, x)[0], float(sim.encodings()[forth].maximum)
    step = float(sim.encodings()[forth].scale)
    assert float(output.max()) <= largest + step
    codes = run(sim.model, x)[0].double() / step
    assert float((codes - codes.round()).abs().max()) < 1e-3


def steps(net):
    directions = ("", "_reverse") if net.bidirectional else ("",)
    return [f"l{layer}{direction}" for layer in range(net.num_layers) for direction in directions]


PRODUCTS = ("projection", "cell.hidden_projection")
SITES = {  # what is computed in a step, without the gates that are inside a product
    nn.LSTM: ("cell.gates", "cell.input_gate", "cell.cell_gate", "cell.cell.addcmul", "cell.cell_tanh", "cell.hidden"),
    nn.GRU: ("cell.update_gate", "cell.new_gate", "cell.hidden"),
    nn.RNN: ("cell.hidden",),
}
GATES = {nn.LSTM: ("forget_gate", "output_gate"), nn.GRU: ("reset_gate",)}


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("kind", SITES)
def test_gates_hidden_and_cell_state_are_sites_of_every_step_and_products_by_the_profile_int8(kind):
    model, prepared, x = case(kind, "without_bias")
    rule = {"match": {"op": ["lstm", "gru", "rnn"]}, "inside": "int8"}
    for config, names in (("default", SITES[kind]), ({"version": 1, "rules": [rule]}, (*PRODUCTS, *SITES[kind]))):
        sim = simulated(prepared, x, config=config)
        for step in steps(model.rnn):
            assert {f"rnn.{step}.{name}:out" for name in names} <= set(sim.encodings())


@pytest.mark.medium
@pytest.mark.parametrize("kind", GATES)
def test_every_gate_is_a_site(kind):
    _, prepared, x = case(kind, "plain")
    sim = simulated(prepared, x)
    assert {f"rnn.l0.cell.{gate}:out" for gate in GATES[kind]} <= set(sim.encodings())


def test_one_encoding_serves_all_time_steps():
    _, prepared, x = case(nn.LSTM, "plain")
    sim = simulated(prepared, x)
    seen = []
    quantizer = sim.quantizers["rnn.l0.cell.hidden:out"]
    quantizer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    run(sim.model, x)
    assert len(seen) == T
    largest, smallest = (f(torch.stack([f(value) for value in seen])) for f in (torch.max, torch.min))
    step = float(quantizer.encoding.scale)
    # calibration ran in float, so the inputs here are off by what the other quantizers round
    assert float(quantizer.encoding.maximum) == pytest.approx(float(largest), abs=10 * step)
    assert float(quantizer.encoding.minimum) == pytest.approx(float(smallest), abs=10 * step)


@pytest.mark.medium
def test_a_start_state_is_quantized_where_it_comes_in():
    torch.manual_seed(0)
    model = Net(nn.LSTM).eval()
    inputs = (torch.randn(T, N, I), torch.randn(1, N, H), torch.randn(1, N, H))
    sim = simulated(model, inputs, 16)
    assert len([name for name in sim.encodings() if name.endswith(":input")]) == 3
    assert_near_float(run(model, inputs), run(sim.model, inputs))


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("stated", [False, True])
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_are_torchs_bypassed_and_near_it_at_16_bits(kind, stated):
    torch.manual_seed(0)
    model = Cell(kind).eval()
    states = [torch.randn(N, H) for _ in range(2 if kind is nn.LSTMCell else 1)]
    inputs = (torch.randn(N, I), *(states if stated else []))
    sim = simulated(model, inputs, 16)
    expected = run(model, inputs)
    assert_near_float(expected, run(sim.model, inputs))
    with in_mode(sim.quantizers.values(), qtk.Mode.BYPASS):
        assert same(expected, run(sim.model, inputs))
    assert {"cell.weight_ih", "cell.weight_hh", "cell.step.cell.hidden:out"} <= set(
        sim.encodings())


class Tagger(nn.Module):
    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.rnn, self.head = kind(I, H, batch_first=True), nn.Linear(H, 4)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


OUTSIDE = {"version": 1, "rules": [{"match": {"op": "lstm_cell"}, "output": "float"}]}


@pytest.fixture
def tagger():
    torch.manual_seed(0)
    return Tagger().eval(), torch.randn(N, T, I)


@pytest.mark.medium
def test_a_float_inside_leaves_the_net_fused_and_quantizes_what_it_hands_out(tagger):
    model, x = tagger
    sim = simulated(model, x, config=OUTSIDE)
    names = set(sim.encodings())
    assert not [name for name in names if ".cell." in name or name.endswith("projection:out")]
    assert {"rnn:out[0]", "rnn.weight_ih_l0", "rnn.weight_hh_l0"} <= names
    counts = fused_calls(sim.model)
    run(sim.model, x)
    assert counts == {"cell": 0, "composite": 1}
    outputs = []
    sim.quantizers["rnn:out[0]"].register_forward_hook(lambda module, args, out: outputs.extend((args[0], out)))
    run(sim.model, x)
    weights = copy.deepcopy(model.rnn)
    with torch.no_grad():
        for name in ("weight_ih_l0", "weight_hh_l0"):
            weight = getattr(weights, name)
            scale = sim.encodings()[f"rnn.{name}"].scale[:, None]
            weight.copy_((weight / scale).round().clamp(-128, 127) * scale)
        e = sim.encodings()["x:input"]
        rounded = ((x / e.scale).round() + e.zero_point).clamp(0, 255).sub(e.zero_point) * e.scale
        torch.testing.assert_close(weights(rounded)[0], outputs[0], rtol=0, atol=1e-6)
    assert outputs[1].unique().numel() <= 256


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("grad", [False, True])
def test_quantized_weights_alone_leave_the_net_fused(tagger, grad):
    model, x = tagger
    sim = qtk.QuantSim(model, x, activation_bits=None)
    sim.compute_encodings(None, progress=False)
    assert {"rnn.weight_ih_l0", "rnn.weight_hh_l0"} <= set(sim.encodings())
    counts = fused_calls(sim.model)
    with torch.set_grad_enabled(grad):
        found = sim.model(x)
    assert counts == {"cell": 0, "composite": 1}
    assert not torch.equal(found, model(x))


@pytest.mark.medium
def test_a_quantized_inside_runs_step_by_step(tagger):
    model, x = tagger
    sim = simulated(model, x)
    counts = fused_calls(sim.model)
    run(sim.model, x)
    assert counts == {"cell": 1 + T, "composite": 1}
    with in_mode(sim.quantizers.values(), qtk.Mode.BYPASS):
        run(sim.model, x)
    assert counts == {"cell": 1 + T, "composite": 2}


@pytest.mark.slow
def test_packed_sequences_are_quantized_inside_too():
    torch.manual_seed(0)
    model = ToTotalLength().eval()
    inputs, other = sequences(4), sequences(lengths=[2, 5, 5])
    prepared = qtk.prepare_model(model, inputs)
    for given in (inputs, other):
        assert same(run(model, given), run(prepared, given))
    sim = simulated(prepared, inputs, 16, data=[inputs, other])
    for given in (inputs, other):
        assert_near_float(run(model, given), run(sim.model, given))
        with in_mode(sim.quantizers.values(), qtk.Mode.BYPASS):
            assert same(run(model, given), run(sim.model, given))
    made = {f"rnn.{step}.{name}:out" for step in ("l0", "l0_reverse") for name in SITES[nn.LSTM]}
    assert made <= set(sim.encodings())


@pytest.mark.medium
def test_dropout_falls_between_layers_in_train_mode_only():
    torch.manual_seed(0)
    model = Net(nn.GRU, num_layers=2, dropout=0.5).eval()
    x = torch.randn(T, N, I)
    prepared = qtk.prepare_model(model, x)
    sim = simulated(prepared, x)
    for module in (prepared, sim.model):
        assert same(run(module, x), run(module, x))
        module.train()
        first, second = run(module, x), run(module, x)
        assert not torch.equal(first[0], second[0])
        assert torch.equal(first[1][0], second[1][0])  # the last state of the first layer
        module.eval()
    torch.manual_seed(1)
    expected = run(model.train(), x)
    torch.manual_seed(1)
    assert same(expected, run(prepared.train(), x))


@pytest.mark.medium
def test_gradients_reach_every_parameter_through_the_simulated_steps():
    model, prepared, x = case(nn.LSTM, "two_layers")
    sim = simulated(prepared, x)
    sim.model(x)[0].square().sum().backward()
    parameters = dict(sim.model.named_parameters())
    for name, _ in model.named_parameters():
        gradient = parameters[name].grad
        assert gradient is not None
        assert bool(gradient.isfinite().all())
        assert bool(gradient.any())


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_copy_and_a_file_are_the_simulation_and_apart_from_it(kind, tmp_path):
    _, prepared, x = case(kind, "both_ways")
    sim = simulated(prepared, x)
    expected = run(sim.model, x)
    other = copy.deepcopy(sim.model)
    sim.save(tmp_path / "sim")
    loaded = qtk.QuantSim.load(tmp_path / "sim", prepared, x)
    with torch.no_grad():
        for parameter in sim.model.parameters():
            parameter.zero_()
    for quantizer in sim.quantizers.values():
        quantizer.mode = qtk.Mode.BYPASS
    assert not same(expected, run(sim.model, x))
    assert same(expected, run(other, x))
    assert same(expected, run(loaded.model, x))
    assert all(loaded.encodings()[name].equals(encoding) for name, encoding in sim.encodings().items())
