"""AIMET's JSON means here what it means there."""

import warnings
from pathlib import Path

import pytest

from qtk.config.aimet import is_aimet
from qtk.config.load import load_config
from qtk.config.tensor_setting import TensorSetting
from qtk.errors import ConfigError
from tests.config.test_load import chains

AIMET = Path(__file__).parent / "data" / "aimet_npu.json"
ON = {"defaults": {"ops": {"is_output_quantized": "True"}, "params": {"is_quantized": "True", "is_symmetric": "True"}}}


def silent(value):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load_config(value)


def with_op(name, entry, **defaults):
    return {"defaults": {**ON["defaults"], **defaults}, "op_type": {name: entry}}


def rules_for(config, kind):
    return [rule for rule in config.rules if kind in rule.match.op and rule.match.op != ("batch_norm",)]


def test_a_file_with_every_section_is_read():
    with pytest.warns(UserWarning, match=r"ignored: defaults\.supported_kernels \(widths come from QuantSim"):
        config = load_config(AIMET)
    assert config.defaults.weight == TensorSetting(symmetric=True, granularity="per_tensor", narrow_range=False)
    assert config.defaults.activation == TensorSetting(symmetric=False, narrow_range=False)
    assert config.defaults.bias == "float"
    assert [rule.weight for rule in rules_for(config, "conv")] == [TensorSetting(granularity="per_channel")]
    assert [rule.weight for rule in rules_for(config, "linear")] == [TensorSetting(granularity="per_channel")]
    assert rules_for(config, "layer_norm")[0].weight == TensorSetting(symmetric=False, narrow_range=False)
    assert rules_for(config, "relu") == []  # the op keeps its constraint by itself
    assert rules_for(config, "softmax")[0].output == TensorSetting(range=(0.0, 1.0))
    assert rules_for(config, "add")[0].output == "float"
    assert rules_for(config, "tanh")[0].output == TensorSetting(symmetric=True, narrow_range=False)
    assert config.io.inputs == "quantized"
    assert all(rule.optional for rule in config.rules)


def test_supergroups_hold_through_batch_norm_and_for_each_kind():
    groups = chains(silent({**ON, "supergroups": [{"op_list": ["Conv", "Clip"]}, {"op_list": ["Add", "Relu"]}]}))
    assert {("conv", "relu6"), ("conv", "clamp"), ("conv", "hardtanh"), ("add", "relu")} <= set(groups)
    assert {("conv", "batch_norm"), ("linear", "batch_norm"), ("conv", "batch_norm", "relu6")} <= set(groups)
    assert ("add", "batch_norm", "relu") not in groups


def test_a_pattern_with_its_own_batch_norm_gets_no_second_one():
    groups = chains(silent({**ON, "supergroups": [{"op_list": ["Conv", "BatchNormalization", "Relu"]}]}))
    assert ("conv", "batch_norm", "relu") in groups
    assert all(group.count("batch_norm") < 2 for group in groups)


def test_what_is_not_turned_on_is_float():
    config = silent({"defaults": {"ops": {}, "params": {}}, "op_type": {"Conv": {"is_output_quantized": "True"}}})
    assert config.defaults.weight == config.defaults.activation == config.defaults.bias == "float"
    assert config.io.inputs == "float"
    assert rules_for(config, "conv")[0].output == "quantized"


def test_settings_hold_for_what_an_op_type_turns_on():
    value = {
        "defaults": {"ops": {"is_symmetric": "True"}, "params": {"is_symmetric": "True"}},
        "op_type": {"Conv": {"is_output_quantized": "True", "params": {"weight": {"is_quantized": "True"}}}},
    }
    config = silent(value)
    everywhere = next(rule for rule in config.rules if rule.match.path == ("*",))
    assert everywhere.output == TensorSetting(symmetric=True)
    assert everywhere.weight == TensorSetting(symmetric=True, granularity="per_tensor")
    assert rules_for(config, "conv")[0].weight == "quantized"


def test_later_sections_win():
    value = {
        "defaults": ON["defaults"],
        "params": {"weight": {"is_symmetric": "False"}, "bias": {"is_quantized": "False"}},
        "op_type": {"Conv": {"params": {"weight": {"is_quantized": "False"}}}},
    }
    config = silent(value)
    assert config.defaults.weight == TensorSetting(symmetric=False, granularity="per_tensor")
    assert rules_for(config, "conv")[0].weight == "float"


def test_a_narrower_op_type_is_heard_after_a_wider_one():
    value = {**ON, "op_type": {
        "Gemm": {"per_channel_quantization": "True"}, "MatMul": {"per_channel_quantization": "False"},
    }}
    assert [rule.weight.granularity for rule in rules_for(silent(value), "linear")] == ["per_tensor", "per_channel"]


def test_strict_symmetric_narrows_symmetric_ranges_alone():
    config = silent(with_op("LayerNormalization", {"params": {"weight": {"is_symmetric": "False"}}},
                            strict_symmetric="True"))
    assert config.defaults.weight.narrow_range is True
    assert config.defaults.activation.narrow_range is False
    assert rules_for(config, "layer_norm")[0].weight.narrow_range is False


def test_quantized_biases_have_a_width():
    config = silent(ON)
    assert config.defaults.bias == TensorSetting(bits=16, symmetric=True)
    config = silent(with_op("Conv", {"params": {"bias": {"is_quantized": "False"}}}))
    assert rules_for(config, "conv")[0].bias == "float"


def test_an_input_is_quantized_with_the_symmetry_of_its_op():
    config = silent(with_op("MatMul", {"is_input_quantized": "True", "is_symmetric": "True"}))
    assert [rule.input for rule in rules_for(config, "matmul")] == ["quantized", TensorSetting(symmetric=True)]


def test_a_single_bound_is_a_bound_unless_the_op_keeps_it_anyway():
    config = silent(with_op("Elu", {"encoding_constraints": {"min": -1.0}}))
    assert [rule.output.bounds for rule in config.rules if rule.match.op == ("elu",)] == [(-1.0, None)]
    silent(with_op("Sigmoid", {"encoding_constraints": {"max": 1.0}}))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (with_op("Convv", {"is_output_quantized": "True"}), r"op_type\.Convv \(an op type not known.*'Conv'"),
        ({**ON, "supergroup_pass_list": ["MatmulAdd"]}, "supergroup_pass_list"),
        (with_op("Conv", {}, hw_version="v9"), r"defaults\.hw_version \(it names a version of the hardware"),
        (with_op("Conv", {"supported_kernels": []}), r"op_type\.Conv\.supported_kernels"),
        ({**ON, "params": {"weight_ih": {"is_quantized": "False"}}}, r"params\.weight_ih"),
        (with_op("Conv", {}, unsigned_symmetric="True"), r"defaults\.unsigned_symmetric"),
    ],
)
def test_what_cannot_be_followed_is_ignored_aloud(value, said):
    with pytest.warns(UserWarning, match=said):
        load_config(value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({**ON, "op_types": {}, "model_input": {}}, r"config: op_types: unknown key .*did you mean 'op_type'"),
        ({"defaults": {"ops": {"is_output_quantised": "True"}, "params": {}}}, r"defaults\.ops\.is_output_quantised"),
        (with_op("Conv", {"is_symetric": "True"}), r"op_type\.Conv\.is_symetric: .*'is_symmetric'"),
        (with_op("Conv", {"is_symmetric": "yes"}), r"op_type\.Conv\.is_symmetric: got 'yes'; must be \"True\""),
        (with_op("Conv", "True"), r"op_type\.Conv: got 'True'; must be an object"),
        (with_op("Conv", {"params": {"weight": {"is_quantized": 1.5}}}), r"params\.weight\.is_quantized: got 1.5"),
        (with_op("Elu", {"encoding_constraints": {"min": "0"}}), r"constraints\.min: got '0'; must be a number"),
        (with_op("Elu", {"encoding_constraints": {"low": 0}}), r"encoding_constraints\.low: unknown key"),
        (with_op("Elu", {"encoding_constraints": {"min": 2, "max": 1}}), r"range \[2.0, 1.0\]"),
        ({**ON, "supergroups": {}}, "supergroups: got {}; must be a list"),
        ({**ON, "supergroups": [["Conv", "Relu"]]}, r"supergroups\[0\]: .* an op_list"),
        ({**ON, "supergroups": [{"op_list": ["Conv"]}]}, r"supergroups\[0\]\.op_list: .* two or more"),
        ({**ON, "supergroups": [{"ops": ["Conv", "Relu"]}]}, r"supergroups\[0\]\.ops: unknown key"),
    ],
)
def test_what_aimet_does_not_know_is_an_error_with_its_path(value, said):
    with pytest.raises(ConfigError, match=said):
        load_config(value)


def test_our_own_configurations_are_not_taken_for_aimets():
    assert not is_aimet({"version": 1, "defaults": {"weight": {}}, "supergroups": []})
    assert not is_aimet({"defaults": {"weight": {}}})
    assert is_aimet({"op_type": {}})
