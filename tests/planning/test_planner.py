"""What is quantized where, checked site by site on models small enough to decide by hand."""

import warnings
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.config.files import shipped_names
from qtk.config.load import load_config
from qtk.core.granularity import PerChannel
from qtk.core.width import FROM_CONFIG
from qtk.errors import CaptureError, ConfigError, SpecError
from qtk.planning.planner import plan
from qtk.workflow.prepare import prepare_model
from tests.planning.plans import BARE, PER_CHANNEL, ConvReluConv, by_name, leaders, plan_of
from tests.zoo.prepared import slow_but


@pytest.mark.medium
def test_every_produced_value_and_weight_has_one_site():
    names = list(by_name(plan_of(ConvReluConv(), torch.randn(2, 3, 9, 9))))
    assert names == ["x:input", "conv1.weight", "conv1:out", "relu:out", "conv2.weight", "conv2:out"]


def test_data_movement_carries_the_encoding_and_gets_no_site():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 1), nn.Linear(4, 2)

        def forward(self, x):
            return self.b(F.max_pool2d(self.a(x), 2).flatten(2).transpose(1, 2))

    names = list(by_name(plan_of(Net(), torch.randn(2, 3, 4, 4))))
    assert names == ["x:input", "a.weight", "a:out", "b.weight", "b:out"]


def test_integers_booleans_and_shapes_stay_out():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x, index):
            y = self.a(x)
            best = y.argmax(dim=1)
            return y[index], best, (y > 0).sum(), y.shape[0] * 2

    names = list(by_name(plan_of(Net(), (torch.randn(3, 4), torch.tensor([0, 2])))))
    assert names == ["x:input", "a.weight", "a:out"]


def test_an_encoding_does_not_leak_through_an_integer():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.b(self.a(x).to(torch.int64).to(torch.float32))

    quant_plan = plan_of(Net(), torch.randn(3, 4))
    assert list(by_name(quant_plan)) == ["x:input", "a.weight", "identity_1:out", "b.weight", "b:out"]
    assert leaders(quant_plan) == {}


@pytest.mark.medium
def test_widths_of_none_leave_weights_or_activations_in_float():
    inputs = torch.randn(2, 3, 9, 9)
    assert list(by_name(plan_of(ConvReluConv(), inputs, activation_bits=None))) == ["conv1.weight", "conv2.weight"]
    assert "conv1.weight" not in by_name(plan_of(ConvReluConv(), inputs, weight_bits=None))


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("config", slow_but(shipped_names("targets"), "default", "onnxruntime", "qnn_htp_lpbq",
                                            "tensorrt_fp8", "weight_only_int4"))
def test_no_shipped_target_quantizes_what_a_width_of_none_leaves_in_float(config):
    model = nn.TransformerEncoderLayer(128, 2, dim_feedforward=128, batch_first=True).eval()
    sim = qtk.QuantSim(model, torch.randn(2, 5, 128), config=config, activation_bits=None)
    weights = {"self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"}
    norms = {"norm1.weight", "norm2.weight"} if config.startswith("qnn_htp") else set()
    assert set(by_name(sim.plan)) == weights | norms
    if config == "weight_only_int4":
        return
    sim = qtk.QuantSim(model, torch.randn(2, 5, 128), config=config, weight_bits=None)
    assert not {name for name in by_name(sim.plan) if name.endswith(("weight", "bias"))}


def test_later_rules_win_by_op_and_by_path():
    config = {
        **BARE,
        "rules": [
            {"match": {"op": "conv"}, "weight": {"bits": 8}},
            {"match": {"path": "conv2*"}, "weight": {"bits": 6}, "output": {"bits": 16}},
            {"match": {"op": "relu", "path": "relu"}, "output": "float"},
        ],
    }
    quant_plan = plan_of(ConvReluConv(), torch.randn(2, 3, 9, 9), config)
    decided = by_name(quant_plan)
    assert decided["conv1.weight"].spec.dtype.bits == 8
    assert decided["conv2.weight"].spec.dtype.bits == 6
    assert decided["conv2:out"].spec.dtype.bits == 16
    assert "rules[1]" in decided["conv2:out"].reason
    assert "relu:out" not in decided


def test_a_rule_that_matches_nothing_is_an_error():
    config = {**BARE, "rules": [{"match": {"path": "conv9*"}, "weight": {"bits": 8}}]}
    with pytest.raises(ConfigError, match=r"rules\[0\] .*: no op has the path conv9\*; did you mean 'conv"):
        plan_of(ConvReluConv(), torch.randn(2, 3, 9, 9), config)


def test_a_fixed_range_is_taken_from_the_rule():
    config = {**BARE, "rules": [{"match": {"op": "softmax"}, "output": {"range": [0.0, 1.0]}}]}
    decided = by_name(plan_of(nn.Sequential(nn.Softmax(-1)), torch.randn(2, 4), config))
    assert decided["0:out"].range == (0.0, 1.0)


def test_a_width_left_out_is_that_of_the_config_else_8():
    inputs, config = torch.randn(2, 3, 9, 9), {"version": 1, "defaults": {"weight": {"bits": 6}}}
    decided = by_name(plan_of(ConvReluConv(), inputs, config, weight_bits=FROM_CONFIG, activation_bits=FROM_CONFIG))
    assert decided["conv1.weight"].spec.dtype.bits == 6
    assert decided["relu:out"].spec.dtype.bits == 8


@pytest.mark.parametrize("bits", [0, 1, 17, 40])
def test_widths_without_a_dtype_are_refused(bits):
    with pytest.raises(SpecError, match=f"^weight_bits must be an int from 2 to 16, got {bits}"):
        plan_of(ConvReluConv(), torch.randn(2, 3, 9, 9), weight_bits=bits)


def test_planning_is_pure():
    prepared = prepare_model(ConvReluConv().eval(), torch.randn(2, 3, 9, 9))
    before = str(prepared.graph)
    plans = [plan(prepared, load_config("default"), weight_bits=8, activation_bits=8, scheme="min_max")
             for _ in range(2)]
    assert plans[0] == plans[1]
    assert str(prepared.graph) == before


@pytest.mark.medium
def test_multi_output_models_reach_every_layer():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

        def forward(self, x):
            hidden = []
            for layer in self.layers:
                x = F.relu(layer(x))
                hidden.append(x)
            return hidden

    decided = by_name(plan_of(Net(), torch.randn(2, 6), PER_CHANNEL))
    for index in range(4):
        assert decided[f"layers.{index}.weight"].spec.granularity == PerChannel(0)


@pytest.mark.medium
def test_a_plan_that_quantizes_nothing_is_refused():
    x = torch.randn(2, 4)
    rule = {"match": {"path": "*"}, "weight": "float", "input": "float", "output": "float"}
    with pytest.raises(ConfigError, match=r"nothing of this model would be .*:\n  .*weight: float by rules\[0\]"):
        qtk.QuantSim(nn.Linear(4, 4), x, config={"version": 1, "rules": [rule], "io": {"inputs": "float"}})
    assert not qtk.QuantSim(nn.Linear(4, 4), x, weight_bits=None, activation_bits=None).plan


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer, self.head = nn.Linear(4, 4, bias=False, dtype=torch.complex64), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.fft.ifft(self.mixer(torch.fft.fft(x))).real)


@pytest.mark.medium
def test_what_is_computed_of_complex_numbers_stays_in_float_and_is_listed():
    x = torch.randn(3, 4)
    sim = qtk.QuantSim(Complex(), x)
    assert {"head.weight", "head:out"} <= sim.quantizers.keys()
    reasons = {site.name: reason for site, reason in sim.plan.unquantized.items()}
    assert reasons["mixer.weight"] == reasons["mixer.linear:out"] == "complex numbers, which have no quantized form"
    prepared = qtk.prepare_model(Complex(), x, modules_to_exclude=["mixer"])
    assert {"aten.fft_fft.default", "aten.fft_ifft.default"} <= set(prepared.report.unknown_ops)
    assert qtk.QuantSim(prepared, x).quantizers.keys() == sim.quantizers.keys()


def test_complex_numbers_apart_from_weights_stay_as_they_are():
    class Filter(nn.Linear):
        def forward(self, x):
            return super().forward(torch.fft.fft(x).real)

    assert list(qtk.QuantSim(Filter(4, 2), torch.randn(3, 4)).quantizers) == ["real:out", "weight", "linear:out"]


def test_an_op_with_weights_on_a_sparse_input_is_named():
    class Sparse(nn.Linear):
        def forward(self, x):
            return x @ self.weight

    with pytest.raises(CaptureError, match=r"matmul:out: aten.matmul.* reads sparse_csr .*x:input.* module of its own"):
        qtk.QuantSim(Sparse(4, 4), torch.randn(3, 4).to_sparse_csr())


@pytest.mark.medium
def test_a_weight_that_blocks_do_not_divide_stays_in_float_where_the_config_says_so():
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 8))
    blocks = {"granularity": "per_block", "block_size": 32, "remainder": "float"}
    config = {"version": 1, "defaults": {"weight": {**blocks, "bits": 4}, "activation": "float"}}
    decided = qtk.QuantSim(model.eval(), torch.randn(2, 64), config=config).plan
    assert list(by_name(decided)) == ["0.weight"]
    reason = next(each for site, each in decided.unquantized.items() if site.name == "2.weight")
    assert "32" in reason
    assert "(8, 48)" in reason
    del blocks["remainder"]
    with pytest.raises(SpecError, match=r"2\.weight: .*32"):
        qtk.QuantSim(model.eval(), torch.randn(2, 64), config={**config, "defaults": {
            "weight": {**blocks, "bits": 4}, "activation": "float"}})


def said(model, x, **settings):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        qtk.QuantSim(model.eval(), x, **settings)
    return [str(each.message) for each in caught if "that the config asks for" in str(each.message)]


def layers(*widths):
    return nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(widths)))


def test_weights_that_blocks_do_not_divide_are_counted_in_parameters():
    (line,) = said(layers(100, 160, 64), torch.randn(2, 100), config="weight_only_int4")
    share = 16000 / (16000 + 10240)
    assert line.startswith(f"{share:.0%} of the weights that the config asks for stay in float (1 of 2 tensors): ")
    assert "0.weight: float by rules[1]: block_size 32 does not divide axis 1 of shape (160, 100)" in line


def test_the_norm_of_a_weight_that_is_quantized_is_no_weight_in_float():
    spectral = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(100, 160))
    assert said(nn.Sequential(spectral, nn.Linear(160, 8)), torch.randn(2, 100)) == []


@pytest.mark.parametrize("settings", [{}, {"config": {"version": 1, "rules": [
    {"match": {"path": "0"}, "weight": "float"}]}}, {"weight_bits": None}])
def test_what_a_rule_leaves_in_float_is_no_news(settings):
    assert said(layers(100, 160, 64), torch.randn(2, 100), **settings) == []


@pytest.mark.medium
def test_a_tied_weight_that_a_rule_leaves_in_float_for_one_reader_is_told():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
            self.head.weight = self.words.weight

        def forward(self, ids):
            return self.head(self.words(ids))

    config = {"version": 1, "defaults": {"activation": "float"}, "rules": [
        {"match": {"path": "*"}, "weight": "float", "optional": True},
        {"match": {"op": "linear"}, "weight": "quantized"}]}
    with pytest.warns(UserWarning, match=r"head.weight is quantized for words too.* says float \(rules\[0\]\)"):
        qtk.QuantSim(Tied().eval(), torch.zeros(2, 3, dtype=torch.long), config=config)
