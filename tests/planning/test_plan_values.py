import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.config.load import load_config
from qtk.graph.unknown_ops import unknown_ops
from qtk.planning.planner import plan
from qtk.workflow.prepare import prepare_model
from tests.planning.plans import BARE, PER_CHANNEL, ConvReluConv, by_name, plan_of


def test_a_supergroup_keeps_only_its_last_quantizer():
    quant_plan = plan_of(ConvReluConv(), torch.randn(2, 3, 9, 9), {**BARE, "supergroups": [["conv", "relu"]]})
    assert "conv1:out" not in by_name(quant_plan)
    assert "relu:out" in by_name(quant_plan)
    reasons = {site.name: why for site, why in quant_plan.unquantized.items()}
    assert "supergroup conv → relu" in reasons["conv1:out"]


class TapInside(ConvReluConv):
    def forward(self, x):
        hidden = self.conv1(x)
        return self.conv2(self.relu(hidden)), hidden


def test_a_value_that_someone_else_reads_is_not_swallowed_by_a_supergroup():
    assert "conv1:out" in by_name(
        plan_of(TapInside(), torch.randn(2, 3, 9, 9), {**BARE, "supergroups": [["conv", "relu"]]})
    )


def test_the_longest_supergroup_wins():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

        def forward(self, x):
            return F.relu(self.bn(self.conv(x)))

    config = {**BARE, "supergroups": [["conv", "batch_norm"], ["conv", "batch_norm", "relu"]]}
    names = list(by_name(plan_of(Net(), torch.randn(2, 3, 4, 4), config)))
    assert [name for name in names if name.endswith(":out")] == ["relu:out"]


def test_an_op_without_a_row_is_listed_and_its_value_quantized_where_it_is_read():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain, self.head = nn.Parameter(torch.randn(4)), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(torch.special.bessel_j0(x) + torch.special.bessel_j0(self.gain))

    prepared = prepare_model(Net().eval(), torch.randn(2, 3, 4), dynamic_shapes=None)
    name = "aten.special_bessel_j0.default"
    assert unknown_ops(prepared) == (name,)
    decided = plan(prepared, load_config(BARE), weight_bits=8, activation_bits=8, scheme="min_max")
    read = [site.name for site, p in decided.items() if "bessel" in p.reason]
    assert read == ["special_bessel_j0:out"]
    left = {site.name for site, why in decided.unquantized.items() if why == f"read by {name}, not in the op table"}
    assert left == {"x:input", "gain"}


def test_io_settings_leave_model_inputs_and_outputs_in_float():
    config = {**BARE, "io": {"inputs": "float", "outputs": "float"}}
    names = list(by_name(plan_of(ConvReluConv(), torch.randn(2, 3, 9, 9), config)))
    assert names == ["conv1.weight", "conv1:out", "relu:out", "conv2.weight"]


def test_values_without_elements_are_no_sites():
    class Prefixed(nn.Module):  # as rotary embeddings do with the tokens before the image, of which there may be none
        def forward(self, x):
            return torch.cat([x[:, :0], x[:, :0] * 3.0, x * 2.0], 1)

    quant_plan = plan_of(Prefixed(), torch.randn(2, 4))
    assert set(by_name(quant_plan)) == {"x:input", "mul_1:out", "concat:out"}
    assert {site.name: why for site, why in quant_plan.unquantized.items()}["mul:out"] == "has no elements"


class CountsTokens(nn.Module):
    """Tokens per expert, counted as floats, and data that they scale."""

    def forward(self, x, expert):
        counts = torch.histc(expert.float(), 4, 0, 3)
        return torch.tanh(x) / counts.sum(), counts.cumsum(0).to(torch.int32)


def test_counts_and_offsets_have_no_site_and_stay_exact():
    expert = torch.arange(4).repeat_interleave(torch.tensor([582, 576, 460, 430]))
    x = torch.randn(2048, 4)
    sim = qtk.QuantSim(CountsTokens(), (x, expert))
    assert list(sim.quantizers) == ["x:input", "tanh:out", "div:out"]
    reasons = {site.name: reason for site, reason in sim.plan.unquantized.items()}
    counting = ["identity:out", "count:out", "sum:out", "cumsum:out"]
    assert reasons == dict.fromkeys(counting, "counts, indices, offsets or a mask")
    sim.compute_encodings([(x, expert)], progress=False)
    assert sim.model(x, expert)[1].tolist() == [582, 1158, 1618, 2048]


def test_images_of_integers_are_quantized_where_a_convolution_reads_them_and_positions_are_not():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.register_buffer("frequency", torch.rand(8))

        def forward(self, image, position):
            angle = position.float()[:, None] * self.frequency
            return self.conv(image.float() / 255), angle.cos()

    decided = plan_of(Both(), (torch.randint(0, 255, (2, 3, 8, 8)), torch.arange(600)))
    assert list(by_name(decided)) == ["div:out", "conv.weight", "conv:out", "cos:out"]


class WeightsAsInputs(nn.Module):
    """Ops whose weights are inputs of the model, one of them reshaped."""

    def forward(self, x, kernel, flat, table, bias):
        ids = torch.arange(2, device=x.device)
        return F.conv2d(x, kernel, bias), F.linear(x, flat.reshape(5, -1)), F.embedding(ids, table)


def weights_as_inputs():
    return torch.randn(2, 3, 8, 6), torch.randn(4, 3, 3, 3), torch.randn(30), torch.randn(4, 5), torch.randn(4)


def test_a_model_input_that_is_used_as_weight_is_quantized_as_an_activation():
    decided = plan_of(WeightsAsInputs(), weights_as_inputs(), PER_CHANNEL)
    inputs = {name: str(site.spec) for name, site in by_name(decided).items() if name.endswith(":input")}
    assert inputs == dict.fromkeys(
        ["x:input", "kernel:input", "flat:input", "table:input"], "uint8 per_tensor asymmetric"
    )
    assert {site.name: reason for site, reason in decided.unquantized.items()} == {
        "bias:input": "read as bias, scale or shift by conv2d"
    }


def test_weights_as_inputs_are_the_same_in_the_file(tmp_path):
    inputs = weights_as_inputs()
    sim = qtk.QuantSim(WeightsAsInputs(), inputs, config="onnxruntime")
    sim.compute_encodings([inputs], progress=False)
    sim.export(tmp_path / "exported")
    assert sim.verify_export(tmp_path / "exported", [inputs], turns=0, progress=False).exact.differing == 0.0
