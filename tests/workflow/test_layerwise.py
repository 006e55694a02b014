"""Layer-wise methods as users call them."""

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import ArgumentError, CalibrationError, CaptureError, ConfigError
from qtk.layerwise.weighted_layers import weighted_layers
from tests.layerwise.convolutional_net import Net, lost, problem, same, state
from tests.zoo.models import ZOO
from tests.zoo.prepared import pair, slow_but


@pytest.mark.medium
def test_methods_in_one_walk():
    model, sim, data = problem(weight_bits=4)
    alone = problem(weight_bits=4)[1]
    qtk.apply_gptq(alone, data, progress=False)
    qtk.apply_layerwise(sim, data, ["seq_mse(num_candidates=30)", "gptq", "bias_correction"], progress=False)
    assert lost(model, sim, data) < lost(model, alone, data)


@pytest.mark.medium
def test_a_fresh_sim_gets_its_ranges_first():
    torch.manual_seed(0)
    model, data = Net().eval(), [torch.randn(8, 2, 5, 5) for _ in range(2)]
    sim = qtk.QuantSim(model, data[0], weight_bits=4)
    qtk.apply_seq_mse(sim, data, progress=False)
    assert set(sim.encodings()) == {"conv.weight", "fc1.weight", "fc2.weight"}
    sim.compute_encodings(data, progress=False)
    sim.check()


@pytest.mark.medium
def test_the_float_model_is_not_touched_and_rounded_weights_lie_on_their_grid():
    model, sim, data = problem()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    qtk.apply_gptq(sim, data, progress=False)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    for name in ("conv.weight", "fc1.weight", "fc2.weight"):
        weight = sim.model.get_parameter(name).detach()
        assert not torch.equal(weight, before[name])
        assert torch.equal(sim.quantizers[name](weight), weight)


@pytest.mark.medium
def test_the_report_says_what_the_outputs_are_worth():
    model, sim, data = problem(activation_bits=None)
    report = qtk.apply_gptq(sim, data, progress=False)
    with torch.no_grad():  # the last layer's output is the model's
        signal = sum(float(model(x).square().sum()) for x in data)
    last = report.layers[-1]
    assert last.signal == pytest.approx(signal, rel=1e-5)
    assert last.noise == pytest.approx(lost(model, sim, data), rel=1e-4)
    assert last.sqnr_before_db < last.sqnr_db
    assert f"{last.sqnr_db:.1f} dB" in str(report)
    fresh = problem(activation_bits=None)[1]
    for name in ("conv", "fc1"):  # up to the last layer all is as in the first walk
        fresh.model.load_state_dict({**fresh.model.state_dict(), **{
            key: value for key, value in sim.model.state_dict().items() if key.startswith(f"{name}.")}})
        fresh.quantizers[f"{name}.weight"].load_encoding(sim.quantizers[f"{name}.weight"].encoding)
    assert last.noise + last.before - last.after == pytest.approx(lost(model, fresh, data), rel=1e-3)


def test_only_the_named_sites_change():
    model, sim, data = problem()
    report = qtk.apply_gptq(sim, data, sites="fc*.weight", progress=False)
    assert [layer.name for layer in report.layers] == ["fc1.weight", "fc2.weight"]
    assert torch.equal(sim.model.get_parameter("conv.weight"), model.conv.weight)
    assert not sim.quantizers["conv.weight"].frozen


@pytest.mark.medium
def test_frozen_encodings_are_left():
    _, sim, data = problem()
    sim.freeze("fc1.weight")
    before = sim.encodings()["fc1.weight"]
    report = qtk.apply_seq_mse(sim, data, progress=False)
    assert "frozen" in report.skipped["fc1.weight"]
    assert "fc1.weight  left as it is" in str(report)
    assert before.equals(sim.encodings()["fc1.weight"])
    qtk.apply_gptq(sim, data, progress=False)  # keeps the encoding, so it may
    assert before.equals(sim.encodings()["fc1.weight"])


@pytest.mark.medium
def test_loaders_of_pairs_and_functions_that_run_the_model():
    sims = [problem()[1] for _ in range(3)]
    data = problem()[2]
    qtk.apply_seq_mse(sims[0], data, progress=False)
    qtk.apply_seq_mse(
        sims[1], [(x, 0) for x in data], forward=lambda model, batch: model(batch[0]).argmax(1), progress=False
    )
    qtk.apply_seq_mse(sims[2], lambda model: [model(x) for x in data], progress=False)
    for other in sims[1:]:
        assert all(own.equals(other.encodings()[name]) for name, own in sims[0].encodings().items())
    few = problem()[1]
    qtk.apply_seq_mse(few, data, num_batches=1, progress=False)
    assert not few.encodings()["fc1.weight"].equals(sims[0].encodings()["fc1.weight"])


@pytest.mark.medium
def test_bad_input_is_refused_and_changes_nothing():
    _, sim, data = problem()
    before = {name: value.clone() for name, value in sim.model.state_dict().items()}
    broken = [data[0], torch.full_like(data[0], torch.nan)]
    for given, words in (([], "no batches"), (broken, "NaN or infinity"), ([torch.randn(2, 3)], "shape")):
        with pytest.raises(CalibrationError, match=words) if words != "shape" else pytest.raises(qtk.QtkError):
            qtk.apply_gptq(sim, given, progress=False)
    with pytest.raises(ConfigError, match="did you mean 'seq_mse'"):
        qtk.apply_layerwise(sim, data, ["seqmse"])
    with pytest.raises(ConfigError, match="unknown setting 'candidates'"):
        qtk.apply_layerwise(sim, data, ["seq_mse(candidates=3)"])
    with pytest.raises(CalibrationError, match="no methods"):
        qtk.apply_layerwise(sim, data, [])
    with pytest.raises(CalibrationError, match="no site is called 'fc3"):
        qtk.apply_gptq(sim, data, sites="fc3.weight")
    with pytest.raises(CalibrationError, match="num_candidates"):
        qtk.apply_seq_mse(sim, data, num_candidates=0)
    with pytest.raises(ArgumentError, match="inputs must be one of 'asym', 'symfp', 'symqt', got 'sym'"):
        qtk.apply_gptq(sim, data, options=qtk.LayerwiseOptions(inputs="sym"), progress=False)
    with pytest.raises(ArgumentError, match="offload must be one of"):
        qtk.apply_gptq(sim, data, options=qtk.LayerwiseOptions(offload="gpu"), progress=False)
    with pytest.raises(TypeError, match="num_batch"):
        qtk.apply_gptq(sim, data, num_batch=3, progress=False)
    assert all(torch.equal(before[name], value) for name, value in sim.model.state_dict().items())


@pytest.mark.medium
def test_what_a_method_cannot_improve_is_named_beforehand():
    rules = [{"match": {"path": "fc1"}, "weight": {"dtype": "fp8_e4m3"}}]
    _, sim, data = problem(config={"version": 1, "extends": "default", "rules": rules})
    report = qtk.apply_adaround(sim, data, iterations=5, progress=False)
    assert "fp8_e4m3" in report.skipped["fc1.weight"]
    assert [layer.name for layer in report.layers] == ["conv.weight", "fc2.weight"]
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2)).eval()
    data = [torch.randn(8, 4)]
    sim = qtk.QuantSim(model, data[0], weight_bits=4)
    sim.compute_encodings(data, progress=False)
    report = qtk.correct_bias(sim, data, progress=False)
    assert report.skipped == {"0.weight": "it has no bias to correct"}
    assert not any(quantizer.frozen for quantizer in sim.quantizers.values())
    sim.quantizers["1.weight"].learn_range()
    with pytest.raises(CalibrationError, match="its range is being learned"):
        qtk.apply_gptq(sim, data, sites="1.weight", progress=False)


def test_a_loader_of_pairs_is_taken_without_its_labels():
    sims = [problem()[1] for _ in range(2)]
    data = problem()[2]
    qtk.apply_gptq(sims[0], [[x, torch.zeros(32)] for x in data], progress=False)
    qtk.apply_gptq(sims[1], data, progress=False)
    first, second = (each.model.state_dict() for each in sims)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.medium
def test_odd_ways_of_asking():
    _, sim, data = problem()
    qtk.apply_layerwise(sim, data, "seq_mse", progress=False)
    with pytest.raises(CalibrationError, match="improve a QuantSim, got Net"):
        qtk.apply_gptq(Net(), data)
    with pytest.raises(CalibrationError, match="no layer was improved: no data reached it"):
        qtk.apply_gptq(sim, [data[0][:0]], progress=False)
    _, sim, data = problem()
    with torch.inference_mode():
        qtk.apply_adaround(sim, data, iterations=20, through_activation=True, progress=False)
    assert not sim.model.get_parameter("fc1.weight").is_inference()


@pytest.mark.sample(5)
@pytest.mark.medium
@pytest.mark.parametrize("method", [qtk.apply_seq_mse, qtk.apply_gptq, qtk.correct_bias])
@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize(("change", "words"), [
    (lambda x: x.double(), r"batch 0 \(float64 \[32, .*does not run"),
    (lambda x: x.half(), r"batch 0 \(float16"),
    (lambda x: (x * 50).to(torch.uint8), "batch 0: input x is uint8, the model was captured for float32"),
])
def test_a_run_that_fails_leaves_everything_as_it_was(method, calibrated, change, words):
    _, sim, data = problem()
    if not calibrated:
        for quantizer in sim.quantizers.values():
            if quantizer.scale is not None:
                quantizer.drop_encoding()
    before = state(sim)
    with pytest.raises((CalibrationError, CaptureError), match=words):
        method(sim, [change(x) for x in data], progress=False)
    assert same(before, state(sim))


@pytest.mark.sample(4)
@pytest.mark.medium
@pytest.mark.filterwarnings("ignore:.*saw fewer rows")
@pytest.mark.parametrize("name", slow_but(
    ZOO, "residual", "all_transposed", "fused_attention", "gru", "recurrent_cells", "reused_block", "tied", "splits",
    "creations", "norms",
))
def test_every_kind_of_model(name):
    data = [ZOO[name].inputs(), ZOO[name].inputs()]
    sim = qtk.QuantSim(pair(name)[1], data[0], weight_bits=4)
    steps = ["seq_mse", "gptq", "bias_correction"]
    if not weighted_layers(sim.model, sim.plan)[0]:
        with pytest.raises(CalibrationError, match="no layer to work on"):
            qtk.apply_layerwise(sim, data, steps, progress=False)
        return
    report = qtk.apply_layerwise(sim, data, steps, progress=False)
    assert all(layer.reason is None for layer in report.layers), str(report)
    sim.compute_encodings(data, progress=False)
    sim.check()


def test_parameters_that_are_left_as_they_are_are_counted():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.other = nn.Linear(8, 8), nn.Bilinear(8, 8, 3)

        def forward(self, x):
            return self.other(self.layer(x), x)

    x = torch.randn(64, 8)
    sim = qtk.QuantSim(Shared().eval(), x, weight_bits=4)
    sim.compute_encodings([x], progress=False)
    with pytest.warns(match=r"75% of the parameters \(1 of 2 weights\) are left as they are: other.weight"):
        qtk.apply_layerwise(sim, [x], "seq_mse", progress=False)


def test_weights_of_a_parametrization_count_among_those_that_are_left():
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 24))
    x = torch.randn(64, 8)
    sim = qtk.QuantSim(nn.Sequential(normed, nn.ReLU(), nn.Linear(24, 2)).eval(), x, weight_bits=4)
    sim.compute_encodings([x], progress=False)
    with pytest.warns(match=r"80% of the parameters \(1 of 2 weights\) are left as they are: .*remove_parametriz"):
        qtk.apply_layerwise(sim, [x], "seq_mse", progress=False)
