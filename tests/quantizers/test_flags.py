import torch

from qtk.ops.gradient_scale import GradientScale
from qtk.quantizers.flags import flags_to_tensors, pop_flags

SET = {"frozen": True, "rewrote_weight": True, "momentum": 0.25, "gradient_scale": GradientScale.NONE}
DEFAULT = {"frozen": False, "rewrote_weight": False, "momentum": None, "gradient_scale": GradientScale.LSQ}


def test_what_is_set_comes_back_and_what_is_default_takes_no_key():
    stored = {"x.scale": torch.ones(1), **flags_to_tensors(SET, "x.")}
    assert pop_flags(stored, "x.") == SET
    assert stored.keys() == {"x.scale"}
    assert flags_to_tensors(DEFAULT, "x.") == {}


def test_a_checkpoint_without_a_scale_says_nothing():
    assert pop_flags({"x.other": torch.ones(1)}, "x.") == {}
    assert pop_flags({"x.scale": torch.ones(1)}, "x.") == {"frozen": False, "rewrote_weight": False}
    learned = {"x.scale": torch.ones(1), "x.scale_factor": torch.ones(1)}
    assert pop_flags(learned, "x.")["gradient_scale"] is GradientScale.LSQ


def test_averages_of_flags_are_flags():
    stored = {name: (value + value) / 2 for name, value in flags_to_tensors(SET, "x.").items()}
    assert pop_flags(stored, "x.") == SET
