import pytest

from qtk.config.load import load_config
from qtk.config.tensor_setting import TensorSetting
from qtk.core.granularity import PerBlock, PerChannel, PerTensor
from qtk.core.spec import ScaleFormat
from qtk.core.width import FROM_CONFIG
from qtk.errors import ConfigError, SpecError
from qtk.planning.decision import Decision
from qtk.planning.rules import Rules, to_spec

FULL = TensorSetting(bits=8, symmetric=True)


def test_settings_become_specs():
    assert to_spec(FULL, None, 4).dtype.name == "int8"
    assert to_spec(TensorSetting(bits=8), None, 4).dtype.name == "uint8"
    assert to_spec(TensorSetting(dtype="int16"), None, 4).symmetric is False
    channel = TensorSetting(bits=4, symmetric=True, granularity="per_channel")
    assert to_spec(channel, (1, 0), 4).granularity == PerChannel(1)
    assert to_spec(channel, None, 4).granularity == PerTensor()
    block = TensorSetting(bits=4, symmetric=True, granularity="per_block", block_size=16)
    assert to_spec(block, (0, 1), 4).granularity == PerBlock((1, 16, -1, -1))
    assert to_spec(block, (0, 0), 1).granularity == PerBlock((16,))


def test_formats_in_blocks_become_specs():
    spec = to_spec(TensorSetting(dtype="nvfp4"), (1, 0), 3)
    assert (spec.dtype.name, spec.granularity, spec.symmetric) == ("fp4_e2m1", PerBlock((16, 1, -1)), True)
    assert spec.scale_format is ScaleFormat.E4M3
    longer = to_spec(TensorSetting(dtype="mxint8", block_size=64), (0, 1), 2)
    assert (longer.granularity, longer.narrow_range, longer.scale_format) == (PerBlock((1, 64)), True, ScaleFormat.E8M0)
    without_channels = to_spec(TensorSetting(dtype="mxfp4"), None, 2)
    assert (without_channels.granularity, without_channels.scale_format) == (PerTensor(), None)
    assert to_spec(TensorSetting(dtype="fp8_e4m3", symmetric=False), None, 2).symmetric


def test_contradictions_of_overlaid_settings_surface():
    with pytest.raises(SpecError, match="dynamic"):
        to_spec(FULL.overlaid(TensorSetting(dynamic=True)).overlaid(TensorSetting(granularity="per_channel")), None, 2)


def test_a_reduced_range_is_that_of_int8_alone():
    reduced = TensorSetting(bits=8, symmetric=True, narrow_range=True, reduced_range=True)
    assert (to_spec(reduced, None, 2).qmin, to_spec(reduced, None, 2).qmax) == (-64, 64)
    for width, codes in ((4, (-7, 7)), (16, (-32767, 32767))):
        spec = to_spec(reduced.overlaid(TensorSetting(bits=width)), None, 2)
        assert (spec.qmin, spec.qmax, spec.reduced_range) == (*codes, False)
    unsigned = to_spec(reduced.overlaid(TensorSetting(dtype="uint8")), None, 2)
    assert (unsigned.qmin, unsigned.qmax, unsigned.symmetric) == (-127, 127, True)


@pytest.mark.parametrize(
    ("enabled", "value", "expected", "reason"),
    [
        (True, "float", False, "after"),
        (False, "quantized", True, "after"),
        (True, TensorSetting(narrow_range=True), True, "after"),
        (False, TensorSetting(narrow_range=True), False, "before"),  # a detail does not switch on what is off
        (False, TensorSetting(bits=4), True, "after"),  # a width does
        (False, None, False, "before"),
    ],
)
def test_only_a_width_or_the_word_switches_a_float_back_on(enabled, value, expected, reason):
    decision = Decision(FULL, enabled, "before").overlaid(value, "after")
    assert (decision.enabled, decision.reason) == (expected, reason)


def test_a_decision_knows_the_rules_that_it_follows():
    decision = Decision(FULL, True, "defaults").overlaid(TensorSetting(bits=4, symmetric=False), "rules[0]", 0)
    assert decision.rules == {0}
    assert decision.overlaid(TensorSetting(dtype="int8"), "rules[1]", 1).rules == {0, 1}
    assert decision.overlaid(TensorSetting(dtype="int8", symmetric=True), "rules[1]", 1).rules == {1}
    off = decision.overlaid("float", "rules[2]", 2)
    assert off.rules == {2}
    assert off.overlaid("quantized", "rules[3]", 3).rules == {0, 3}


def test_widths_come_from_the_constructor():
    rules = Rules(load_config({"version": 1}), weight_bits=4, activation_bits=None)
    assert (rules.weight.setting.bits, rules.weight.enabled) == (4, True)
    assert rules.activation.enabled is False


RULE = {"match": {"op": "add"}, "weight": {"bits": 4}, "output": {"bits": 16}}


def test_a_width_of_none_is_final_whatever_an_optional_rule_says():
    config = load_config({"version": 1, "rules": [RULE | {"optional": True}]})
    left = Rules(config, weight_bits=None, activation_bits=None)
    for decision in (left.weight, left.activation):
        for value in ("quantized", TensorSetting(bits=16), TensorSetting(dtype="int8", scheme="mse")):
            assert not decision.overlaid(value, "rules[0]").enabled
    assert left.weight.overlaid(TensorSetting(bits=4), "rules[0]").reason == "weight_bits=None"
    assert left.activation.overlaid("quantized", "rules[0]").reason == "activation_bits=None"


@pytest.mark.parametrize(
    ("rule", "widths", "message"),
    [
        (RULE, {"activation_bits": None}, r"rules\[0\]\.output \(op add\) asks .* leaves every activation in float"),
        (RULE, {"weight_bits": None}, r"rules\[0\]\.weight .* leave weight_bits out and say .* \{weight: float\}"),
        ({"match": {"op": "add"}, "input": "quantized"}, {"activation_bits": None}, r"rules\[0\]\.input .* optional"),
    ],
)
def test_a_width_of_none_contradicts_a_rule_that_asks_for_quantization(rule, widths, message):
    with pytest.raises(ConfigError, match=message):
        Rules(load_config({"version": 1, "rules": [rule]}),
              **{"weight_bits": FROM_CONFIG, "activation_bits": FROM_CONFIG} | widths)


@pytest.mark.parametrize("value", ["float", {"symmetric": True}, {"range": [0.0, 1.0]}])
def test_a_width_of_none_and_a_rule_that_names_none_agree(value):
    config = load_config({"version": 1, "rules": [{"match": {"op": "add"}, "output": value}]})
    assert not Rules(config, weight_bits=8, activation_bits=None).activation.enabled


WIDE = load_config({"version": 1, "defaults": {"weight": {"dtype": "mxfp4"}, "activation": {"dtype": "int16"}}})


def test_widths_left_out_are_those_of_the_config():
    rules = Rules(WIDE, weight_bits=FROM_CONFIG, activation_bits=FROM_CONFIG)
    assert (rules.weight.setting.dtype, rules.activation.setting.dtype) == ("mxfp4", "int16")
    assert Rules(WIDE, weight_bits=4, activation_bits=16).activation.setting == rules.activation.setting


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        ({"weight_bits": 8}, "says 4 bits, weight_bits=8 was given; .* pass 4,"),
        ({"weight_bits": 6}, "says 4 bits, weight_bits=6 was given"),
        ({"activation_bits": 8}, "says 16 bits, activation_bits=8 was given; leave activation_bits out"),
    ],
)
def test_a_width_that_contradicts_the_config_is_an_error_8_like_any_other(widths, message):
    with pytest.raises(ConfigError, match=message):
        Rules(WIDE, **{"weight_bits": FROM_CONFIG, "activation_bits": FROM_CONFIG} | widths)


def test_a_batched_weight_has_a_scale_for_every_matrix_and_channel():
    channel = TensorSetting(bits=8, symmetric=True, granularity="per_channel")
    assert to_spec(channel, (2, 1), 3, batched=True).granularity == PerBlock((1, -1, 1))
    assert to_spec(channel, (2, 0), 4, batched=True).granularity == PerBlock((-1, 1, 1, 1))
    assert to_spec(FULL, (2, 1), 3, batched=True).granularity == PerTensor()
