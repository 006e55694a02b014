"""The schema: what it takes and how it answers mistakes."""

import re

import pytest

from qtk.calibrators.scheme import calibrator
from qtk.config.load import load_config
from qtk.config.schema import QuantConfig, check_op_names, check_schemes
from qtk.config.tensor_setting import TensorSetting
from qtk.errors import ConfigError

DESIGN_EXAMPLE = {
    "version": 1,
    "defaults": {
        "weight": {"symmetric": True, "granularity": "per_channel"}, "activation": {"symmetric": False}, "bias": "float"
    },
    "rules": [
        {"match": {"op": ["layer_norm", "rms_norm"]}, "weight": {"dtype": "int16"}},
        {"match": {"path": "head*"}, "weight": {"bits": 8}, "output": {"bits": 16}},
        {"match": {"op": "softmax"}, "output": {"range": [0.0, 1.0]}},
    ],
    "supergroups": [["conv", "relu"], ["linear", "gelu"]],
    "io": {"inputs": "quantized", "outputs": "quantized"},
}


def with_setting(setting, key="weight"):
    rules = [{"match": {"op": "conv"}, "weight": "float"}, {"match": {"op": "conv"}, key: setting}]
    return {"version": 1, "rules": rules}


def test_the_example_of_the_design_is_taken_as_it_stands():
    config = load_config(DESIGN_EXAMPLE)
    assert config.defaults.weight == TensorSetting(symmetric=True, granularity="per_channel")
    assert config.defaults.bias == "float"
    assert config.rules[0].match.op == ("layer_norm", "rms_norm")
    assert config.rules[1].match.path == ("head*",)
    assert config.rules[1].match.op == ()
    assert config.rules[1].output == TensorSetting(bits=16)
    assert config.rules[2].output.range == (0.0, 1.0)
    assert config.supergroups == (("conv", "relu"), ("linear", "gelu"))


def test_a_config_is_frozen_hashable_and_survives_json():
    config = load_config(DESIGN_EXAMPLE)
    assert load_config(config.model_dump(mode="json")) == config
    assert hash(config) == hash(load_config(DESIGN_EXAMPLE))
    with pytest.raises(ValueError, match="frozen"):
        config.version = 2


def test_all_but_the_version_may_be_left_out():
    config = load_config({"version": 1})
    assert config.defaults.weight == config.defaults.activation == TensorSetting()
    assert (config.defaults.bias, config.io.inputs, config.io.outputs) == ("float", "quantized", "quantized")
    assert config.rules == config.supergroups == ()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "config: version: missing"),
        ({"version": 3}, "version: got 3; must be 1"),
        ({"version": 1, "rulez": []}, "rulez: unknown key; did you mean 'rules'?"),
        ({"version": 1, "io": {"input": "float"}}, "io.input: unknown key; did you mean 'inputs'? known: inputs"),
        ({"version": 1, "io": {"inputs": "int8"}}, "io.inputs: got 'int8'; must be 'quantized' or 'float'"),
        ({"version": 1, "kv_cache": {"dtype": "int4"}}, "kv_cache.dtype: got 'int4'; must be 'int8' or 'fp8_e4m3'"),
        ({"version": 1, "kv_cache": {"dtype": "int8", "granularity": "per_channel"}},
         "kv_cache.granularity: got 'per_channel'; must be 'per_tensor', 'per_head' or 'per_token'"),
        ({"version": 1, "kv_cache": {}}, "kv_cache.dtype: missing; add this key"),
        ({"version": 1, "rules": {}}, "rules: got {}; must be a list"),
        ({"version": 1, "rules": ["conv"]}, "rules[0]: got 'conv'; must be a mapping with keys of match, weight"),
        ({"version": 1, "rules": [{"weight": {"bits": 4}}]}, "rules[0].match: missing"),
        ({"version": 1, "rules": [{"match": {}}]}, "rules[0].match: a match needs op, path, feeds, has_weight, ada"),
        ({"version": 1, "rules": [{"match": {"op": 5}}]}, "rules[0].match.op: got 5; must be a list"),
        ({"version": 1, "rules": [{"match": {"op": "conv"}}]}, "rules[0]: a rule sets weight, bias, input"),
        (with_setting({}), "rules[1].weight: sets nothing; give it a width, a range or the like, or leave it out"),
        ({"version": 1, "exclude": [""]}, "exclude[0]: got ''; must not be empty"),
        ({"version": 1, "exclude": 3}, "exclude: got 3; must be a list"),
        ({"version": 1, "supergroups": [["conv"]]}, "supergroups[0]: got ['conv']; needs at least 2"),
        ({"version": 1, "supergroups": ["conv"]}, "supergroups[0]: got 'conv'; must be a list"),
        (with_setting({"bits": 99}), "rules[1].weight.bits: got 99; must be at most 16"),
        (with_setting({"bits": 1}), "rules[1].weight.bits: got 1; must be at least 2"),
        (with_setting({"bits": "8"}), "rules[1].weight.bits: got '8'; must be a valid integer"),
        (with_setting({"bits": True}), "rules[1].weight.bits: got True; must be a valid integer"),
        (with_setting({"wieght": 3}), "rules[1].weight.wieght: unknown key; known: axis, bits, block_size"),
        (with_setting({"bit": 3}, "output"), "rules[1].output.bit: unknown key; did you mean 'bits'?"),
        (with_setting("flaot"), "rules[1].weight: got 'flaot'; must be 'float' or 'quantized'"),
        (with_setting(8), "rules[1].weight: got 8; must be a mapping"),
        (with_setting({"symmetric": "yes"}), "rules[1].weight.symmetric: got 'yes'; must be a valid boolean"),
        (with_setting({"granularity": "per_row"}), "must be 'per_tensor', 'per_channel', 'per_token' or 'per_block'"),
        (with_setting({"dtype": "itn8"}), "rules[1].weight: unknown dtype 'itn8'; did you mean 'int8'?"),
        (with_setting({"dtype": "int8", "bits": 4}), "dtype int8 has 8 bits, bits says 4"),
        (with_setting({"block_size": 32}), "block_size 32 needs granularity per_block, got None"),
        (with_setting({"block_size": 32, "granularity": "per_tensor"}), "needs granularity per_block, got per_tensor"),
        (with_setting({"granularity": "per_block"}), "granularity per_block needs a block_size"),
        (with_setting({"granularity": "per_block", "block_size": 0}), "weight.block_size: got 0; must be at least 1"),
        (with_setting({"axis": 1}, "output"), "output: axis 1 needs granularity per_channel, got None"),
        (with_setting({"granularity": "per_channel"}, "output"), "no op says which axis of an activation its"),
        (with_setting({"granularity": "per_channel", "axis": 1}), "the op decides which axis of a weight"),
        (with_setting({"granularity": "per_block", "block_size": 8}, "bias"), "per_block is for what products"),
        (with_setting({"range": [1.0, 0.0]}), "rules[1].weight: range [1.0, 0.0] must be [low, high] with low < high"),
        (with_setting({"range": [0.0, float("inf")]}), "rules[1].weight.range[1]: got inf; must be a finite number"),
        (with_setting({"range": [0.0]}), "rules[1].weight.range"),
        (with_setting({"symmetric": True}, "bias"), "rules[1].bias: biases have no width of their own"),
        ({"version": 1, "defaults": {"bias": "quantized"}}, "defaults.bias: biases have no width of their own"),
    ],
)
def test_a_mistake_is_answered_with_its_path_the_value_and_the_rule(given, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config(given)


def test_all_mistakes_are_listed_at_once():
    rule = {"match": {"op": "conv"}, "weight": {"bits": 0}, "bais": "float"}
    with pytest.raises(ConfigError) as caught:
        load_config({"version": 1, "rules": [rule], "x": 1})
    message = str(caught.value)
    assert message.startswith("config: 3 mistakes\n")
    for path in ("rules[0].weight.bits", "rules[0].bais", "x"):
        assert f"\n  {path}: " in message


def test_a_bias_takes_its_width_from_the_defaults():
    rule = {"match": {"op": "conv"}, "bias": "quantized"}
    assert load_config({"version": 1, "defaults": {"bias": {"bits": 16}}, "rules": [rule]}).rules[0].bias == "quantized"


def test_alternatives_in_a_supergroup_are_kept():
    config = load_config({
        "version": 1,
        "supergroups": [[["conv", "linear"], "batch_norm", ["relu", "gelu"]], ["conv", "batch_norm", "relu"]],
    })
    assert config.supergroups == (
        (("conv", "linear"), "batch_norm", ("relu", "gelu")), ("conv", "batch_norm", "relu"),
    )
    assert QuantConfig.model_validate(config.model_dump(mode="json")) == config
    assert load_config({"version": 1, "supergroups": [[["conv"], "relu"]]}).supergroups == (("conv", "relu"),)


def test_many_alternatives_are_not_multiplied_out_and_have_a_bound():
    chain = [["conv", "relu", "gelu", "linear"]] * 2000
    assert len(load_config({"version": 1, "supergroups": [chain]}).supergroups[0]) == 2000
    with pytest.raises(ConfigError, match="supergroups: more than 10000 op names; use fewer or shorter chains"):
        load_config({"version": 1, "supergroups": [chain, chain]})


def test_unknown_op_names_are_listed_with_path_and_nearest():
    config = QuantConfig(
        version=1, rules=[{"match": {"op": ["conv", "sotfmax"]}, "output": "float"}],
        supergroups=[["conv", "rleu"], ["conv", "relu"]],
    )
    with pytest.raises(ConfigError) as caught:
        check_op_names(config, {"conv", "relu", "softmax"})
    assert "rules[0].match.op: unknown op 'sotfmax'; did you mean 'softmax'?" in str(caught.value)
    assert "supergroups[0][1]: unknown op 'rleu'; did you mean 'relu'?" in str(caught.value)
    check_op_names(config, {"conv", "rleu", "sotfmax", "relu"})


def test_method_is_no_key_for_a_scheme():
    with pytest.raises(ConfigError, match=r"rules\[1\]\.output\.method: unknown key; .*scheme"):
        load_config(with_setting({"method": "mse"}, "output"))


def test_unknown_schemes_are_listed_with_path_and_nearest():
    config = load_config({
        "version": 1,
        "defaults": {"weight": {"scheme": "min_mx"}},
        "rules": [{"match": {"op": "conv"}, "output": {"scheme": "msee"}}],
    })
    with pytest.raises(ConfigError) as caught:
        check_schemes(config, calibrator)
    assert "defaults.weight.scheme: unknown scheme 'min_mx'; did you mean 'min_max'?" in str(caught.value)
    assert "rules[0].output.scheme: unknown scheme 'msee'" in str(caught.value)
    check_schemes(load_config({"version": 1, "defaults": {"weight": {"scheme": "mse(norm=1)"}}}), calibrator)


@pytest.mark.parametrize("bounds", [[0.0, 0.0], [1.0, None], [None, -0.5], [2.0, 1.0]])
def test_bounds_that_hold_no_zero_are_refused(bounds):
    with pytest.raises(ConfigError, match=r"bounds.*low ≤ 0 ≤ high"):
        load_config(with_setting({"bounds": bounds}, "output"))


def test_a_range_and_bounds_drop_one_another():
    bounded = TensorSetting(range=(0.0, 1.0)).overlaid(TensorSetting(bounds=(0.0, None)))
    assert (bounded.range, bounded.bounds) == (None, (0.0, None))
    pinned = bounded.overlaid(TensorSetting(range=(0.0, 1.0)))
    assert (pinned.range, pinned.bounds) == ((0.0, 1.0), None)
    with pytest.raises(ConfigError, match="leave one out"):
        load_config(with_setting({"bounds": [0.0, None], "range": [0.0, 1.0]}, "output"))


def test_a_format_in_blocks_is_for_what_products_multiply():
    with pytest.raises(ConfigError, match=r"rules\[1\]\.bias.*mxfp4 is for what products multiply"):
        load_config(with_setting({"dtype": "mxfp4"}, "bias"))
    for key in ("input", "output"):
        with pytest.raises(ConfigError, match=r"rules\[1\]\." + key + r".*lpbq_int4 is for weights"):
            load_config(with_setting({"dtype": "lpbq_int4"}, key))
    for key in ("weight", "input", "output"):
        config = load_config(with_setting({"dtype": "mxfp4", "block_size": 16}, key))
        assert getattr(config.rules[1], key) == TensorSetting(dtype="mxfp4", block_size=16)


def test_a_format_in_blocks_has_no_other_granularity_nor_width():
    with pytest.raises(ConfigError, match="dtype mxfp4 is in blocks, granularity says per_channel"):
        load_config(with_setting({"dtype": "mxfp4", "granularity": "per_channel"}))
    with pytest.raises(ConfigError, match="dtype mxfp4 has 4 bits, bits says 8"):
        load_config(with_setting({"dtype": "mxfp4", "bits": 8}))
    with pytest.raises(ConfigError, match="did you mean 'mxfp4'"):
        load_config(with_setting({"dtype": "mxpf4"}))
