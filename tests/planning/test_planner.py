"""What is quantized where, checked site by site on models small enough to decide by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qtk.config.load import load_config
from qtk.core.granularity import PerBlock, PerChannel, PerTensor
from qtk.core.width import FROM_CONFIG
from qtk.errors import SpecError
from qtk.graph.unknown_ops import unknown_ops
from qtk.planning.planner import plan
from qtk.workflow.prepare import prepare_model

BARE = {"version": 1}
PER_CHANNEL = {"version": 1, "defaults": {"weight": {"granularity": "per_channel"}}}


def plan_of(model, inputs, config=BARE, *, weight_bits=4, activation_bits=8, scheme="min_max"):
    prepared = prepare_model(model.eval(), inputs)
    return plan(
        prepared, load_config(config), weight_bits=weight_bits, activation_bits=activation_bits, scheme=scheme
    )


def by_name(quant_plan):
    return {site.name: decided for site, decided in quant_plan.items()}


def leaders(quant_plan):
    return {site.name: decided.leader.name for site, decided in quant_plan.items() if decided.leader}


class ConvReluConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.relu, self.conv2 = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)

    def forward(self, x):
        return self.conv2(self.relu(self.conv1(x)))


def test_every_produced_value_and_weight_has_one_site():
    names = list(by_name(plan_of(ConvReluConv(), torch.randn(2, 3, 9, 9))))
    assert names == ["x:input", "conv1.weight", "conv1:out", "relu:out", "conv2.weight", "conv2:out"]


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


@pytest.mark.parametrize(
    ("module", "shape", "axis"),
    [
        (nn.Conv1d(4, 6, 3), (2, 4, 9), 0),
        (nn.Conv3d(4, 6, 1), (2, 4, 3, 3, 3), 0),
        (nn.ConvTranspose2d(4, 6, 3), (2, 4, 5, 5), 1),
        (nn.ConvTranspose1d(4, 6, 3, groups=2), (2, 4, 5), 1),
        (nn.Linear(4, 6), (2, 4), 0),
    ],
)
def test_per_channel_weights_are_kept_along_their_output_axis(module, shape, axis):
    decided = by_name(plan_of(nn.Sequential(module), torch.randn(shape), PER_CHANNEL))
    assert decided["0.weight"].spec.granularity == PerChannel(axis)
    assert decided["0:out"].spec.granularity == PerTensor()


class FunctionalWeights(nn.Module):
    """Weights that reach their op transposed, sliced or reshaped."""

    def __init__(self):
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(5, 7))
        self.packed = nn.Parameter(torch.randn(12, 7))
        self.flat = nn.Parameter(torch.randn(6, 3, 7))
        self.right = nn.Parameter(torch.randn(7, 4))

    def forward(self, x):
        a, b = self.packed.chunk(2, dim=0)
        return (
            F.linear(x, self.transposed.t().t()),
            x @ self.transposed.t(),
            F.linear(x, a) + F.linear(x, b),
            F.linear(x, self.flat.reshape(18, 7)),
            x @ self.right,
        )


def test_the_channel_axis_is_followed_back_to_the_parameter():
    decided = by_name(plan_of(FunctionalWeights(), torch.randn(3, 7), PER_CHANNEL))
    assert decided["transposed"].spec.granularity == PerChannel(0)
    assert decided["packed"].spec.granularity == PerChannel(0)
    assert decided["right"].spec.granularity == PerChannel(1)
    # reshape merges axes 0 and 1: the axis has no place in the parameter, so the value the op reads is quantized
    assert "flat" not in decided
    assert decided["reshape:out"].spec.granularity == PerChannel(0)
    assert decided["reshape:out"].static


def test_blocks_run_along_the_input_channels():
    config = {"version": 1, "defaults": {"weight": {"granularity": "per_block", "block_size": 4}}}
    net = nn.Sequential(nn.Conv2d(8, 6, 3), nn.Flatten(), nn.Linear(24, 5))
    decided = by_name(plan_of(net, torch.randn(2, 8, 4, 4), config))
    assert decided["0.weight"].spec.granularity == PerBlock((1, 4, -1, -1))
    assert decided["2.weight"].spec.granularity == PerBlock((1, 4))


def test_a_block_size_that_does_not_divide_names_every_layer():
    config = {"version": 1, "defaults": {"weight": {"granularity": "per_block", "block_size": 5}}}
    net = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 16), nn.Linear(16, 18), nn.Linear(18, 2))
    with pytest.raises(SpecError, match=r"2\.weight: block_size 5 .*\(18, 16\)(.|\n)*3\.weight"):
        plan_of(net, torch.randn(2, 10), config)


class Concats(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(8, 2)

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        return self.head(torch.cat([a, b], dim=1)), b


def test_concat_shares_one_encoding_and_a_tapped_producer_keeps_its_own():
    quant_plan = plan_of(Concats(), torch.randn(3, 4))
    assert leaders(quant_plan) == {"a:out": "concat:out", "concat:in[1]": "concat:out"}
    assert by_name(quant_plan)["b:out"].leader is None


def test_concat_of_a_value_with_itself_shares_once():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4)

        def forward(self, x):
            y = self.a(x)
            return torch.cat([y, y], dim=1)

    assert leaders(plan_of(Net(), torch.randn(3, 4))) == {"a:out": "concat:out"}


def test_chained_concats_end_at_one_leader():
    class Net(nn.Module):
        def forward(self, x, y, z):
            return torch.cat([torch.cat([x, y], 1), z], 1)

    quant_plan = plan_of(Net(), (torch.randn(2, 3), torch.randn(2, 3), torch.randn(2, 3)))
    assert set(leaders(quant_plan).values()) == {"concat_1:out"}
    assert set(leaders(quant_plan)) == {"x:input", "y:input", "z:input", "concat:out"}


def test_data_movement_carries_the_encoding_and_gets_no_site():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 1), nn.Linear(4, 2)

        def forward(self, x):
            return self.b(F.max_pool2d(self.a(x), 2).flatten(2).transpose(1, 2))

    names = list(by_name(plan_of(Net(), torch.randn(2, 3, 4, 4))))
    assert names == ["x:input", "a.weight", "a:out", "b.weight", "b:out"]


def test_split_pieces_share_their_source_and_merge_on_edges():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(4, 4)

        def forward(self, x):
            left, right = self.a(x).chunk(2, dim=1)
            return torch.cat([left, self.b(right)], dim=1)

    quant_plan = plan_of(Net(), torch.randn(3, 4))
    assert leaders(quant_plan) == {"concat:in[0]": "concat:out", "b:out": "concat:out"}
    assert by_name(quant_plan)["a:out"].leader is None


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
    assert list(by_name(quant_plan)) == ["x:input", "a.weight", "a:out", "identity_1:out", "b.weight", "b:out"]
    assert leaders(quant_plan) == {}


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


def test_a_parameter_added_to_activations_is_a_constant_operand():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.position, self.gain = nn.Parameter(torch.randn(1, 4)), nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return (x + self.position) * self.gain

    decided = by_name(plan_of(Net(), torch.randn(3, 4)))
    assert list(decided) == ["x:input", "position", "add:out", "mul:out"]
    assert decided["position"].static
    assert decided["position"].spec.dtype.name == "uint8"


def test_one_weight_used_twice_has_one_site_and_each_call_its_own_output():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.act = nn.Linear(4, 4), nn.ReLU()

        def forward(self, x):
            return self.act(self.fc(self.act(self.fc(x))))

    names = list(by_name(plan_of(Net(), torch.randn(3, 4))))
    assert names == ["x:input", "fc.weight", "fc:out", "act:out", "fc@1:out", "act@1:out"]


def test_a_weight_computed_from_parameters_is_quantized_where_the_op_reads_it():
    class Standardized(nn.Conv2d):
        def forward(self, x):
            w = self.weight
            w = (w - w.mean(dim=(1, 2, 3), keepdim=True)) / w.std(dim=(1, 2, 3), keepdim=True)
            return F.conv2d(x, w, self.bias)

    quant_plan = plan_of(nn.Sequential(Standardized(3, 4, 3)), torch.randn(2, 3, 5, 5), PER_CHANNEL)
    decided = by_name(quant_plan)
    assert list(decided) == ["input:input", "0.div:out", "0.conv2d:out"]
    assert decided["0.div:out"].spec.granularity == PerChannel(0)
    assert decided["0.div:out"].spec.dtype.name == "int4"


def test_widths_of_none_leave_weights_or_activations_in_float():
    inputs = torch.randn(2, 3, 9, 9)
    assert list(by_name(plan_of(ConvReluConv(), inputs, activation_bits=None))) == ["conv1.weight", "conv2.weight"]
    assert "conv1.weight" not in by_name(plan_of(ConvReluConv(), inputs, weight_bits=None))


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
    assert quant_plan.unmatched_rules == ()


def test_a_rule_that_matches_nothing_is_remembered():
    config = {**BARE, "rules": [{"match": {"path": "conv9*"}, "weight": {"bits": 8}}]}
    assert plan_of(ConvReluConv(), torch.randn(2, 3, 9, 9), config).unmatched_rules == ("rules[0] (path conv9*)",)


def test_an_input_rule_puts_a_second_quantizer_on_the_edge():
    config = {**BARE, "rules": [{"match": {"path": "conv2"}, "input": {"bits": 16}}]}
    decided = by_name(plan_of(ConvReluConv(), torch.randn(2, 3, 9, 9), config))
    assert decided["conv2:in[0]"].spec.dtype.bits == 16
    assert decided["relu:out"].spec.dtype.bits == 8


def test_io_settings_leave_model_inputs_and_outputs_in_float():
    config = {**BARE, "io": {"inputs": "float", "outputs": "float"}}
    names = list(by_name(plan_of(ConvReluConv(), torch.randn(2, 3, 9, 9), config)))
    assert names == ["conv1.weight", "conv1:out", "relu:out", "conv2.weight"]


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
    with pytest.raises(SpecError, match=f"bits must be an int from 2 to 16, got {bits}"):
        plan_of(ConvReluConv(), torch.randn(2, 3, 9, 9), weight_bits=bits)


def test_prelu_has_a_slope_a_channel():
    decided = by_name(plan_of(nn.Sequential(nn.PReLU(5)), torch.randn(2, 5), PER_CHANNEL))
    assert decided["0.weight"].spec.granularity == PerChannel(0)


def test_planning_is_pure():
    prepared = prepare_model(ConvReluConv().eval(), torch.randn(2, 3, 9, 9))
    before = str(prepared.graph)
    plans = [plan(prepared, load_config("default"), weight_bits=8, activation_bits=8, scheme="min_max")
             for _ in range(2)]
    assert plans[0] == plans[1]
    assert str(prepared.graph) == before


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


def test_values_without_elements_are_no_sites():
    class Prefixed(nn.Module):  # as rotary embeddings do with the tokens before the image, of which there may be none
        def forward(self, x):
            return torch.cat([x[:, :0], x[:, :0] * 3.0, x * 2.0], 1)

    quant_plan = plan_of(Prefixed(), torch.randn(2, 4))
    assert set(by_name(quant_plan)) == {"x:input", "mul_1:out", "concat:out"}
    assert {site.name: why for site, why in quant_plan.unquantized.items()}["mul:out"] == "has no elements"
