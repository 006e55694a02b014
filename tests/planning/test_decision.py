from qtk.config.tensor_setting import TensorSetting
from qtk.planning.decision import Decision

EIGHT = Decision(TensorSetting(bits=8), True, "defaults")


def test_a_width_undoes_float_and_other_settings_do_not():
    left = EIGHT.overlaid("float", "rules[0]", 0)
    assert not left.enabled
    assert not left.overlaid(TensorSetting(symmetric=True), "rules[1]", 1).enabled
    again = left.overlaid(TensorSetting(bits=4), "rules[1]", 1)
    assert (again.enabled, again.setting.bits, again.rules) == (True, 4, {1})


def test_what_the_caller_left_in_float_no_rule_changes():
    final = Decision(TensorSetting(bits=8), False, "weight_bits=None", is_final=True)
    assert final.overlaid(TensorSetting(bits=4), "rules[0]", 0) is final
