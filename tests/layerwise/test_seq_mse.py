"""Against forming every output with every candidate, in float64, on layers of real simulations."""

import pytest
import torch
from torch import nn

from qtk.core.dtypes import DTYPES
from qtk.core.encoding import Encoding
from qtk.errors import CalibrationError, ConfigError
from qtk.layerwise.methods import method
from qtk.layerwise.seq_mse import SeqMse
from qtk.numerics.minifloat import round_to
from tests.layerwise.layers import CHANNEL, LAYERS, TENSOR, blocks_of, case, few_large_, layer_of, named

NUM = 12
SETTINGS = {
    "tensor": TENSOR, "channel": CHANNEL, "block": blocks_of(2),
    "tensor, asymmetric": TENSOR | {"symmetric": False}, "channel, asymmetric": CHANNEL | {"symmetric": False},
    "block, asymmetric": blocks_of(2) | {"symmetric": False},
}


def block_moments(name, setting):
    """Columns of a block of two input channels."""
    if not setting.startswith("block"):
        return None
    return 2 if name == "linear" else 18


def fraction_of(encoding, fraction):
    """The present range made smaller."""
    if encoding.zero_point is None:
        return Encoding(encoding.spec, encoding.scale * fraction)
    low, high = encoding.minimum.double() * fraction, encoding.maximum.double() * fraction
    scale = ((high - low) / (encoding.spec.qmax - encoding.spec.qmin)).float()
    return Encoding(encoding.spec, scale, (encoding.spec.qmin - low / scale).round().int())


def every_loss(given, num=NUM):
    """Shape: [candidates, *scale.shape]."""
    now = given.problem.encoding
    return torch.stack([given.lost_by_scale(given.rounded(fraction_of(now, i / num))) for i in range(1, num + 1)])


def lost(given, found):
    """Of all outputs."""
    return given.lost(given.rounded(found.encoding))


def gained(given, found):
    before, after = found.loss or (given.problem.current_error(), found.current_error())
    return before - after


def true_gain(before, after):
    """Rounded weights are float32: their own rounding is up to about 1e-6 of what they lose."""
    before, after = (float(torch.as_tensor(each).sum()) for each in (before, after))
    return pytest.approx(before - after, abs=1e-5 * before)


@pytest.mark.sample(6)
@pytest.mark.medium
@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", LAYERS)
def test_every_scale_takes_the_candidate_of_least_error(name, setting, noise):
    given = named(name, SETTINGS[setting], noise=noise, block=block_moments(name, setting))
    found = SeqMse(num_candidates=NUM).apply(given.problem)
    every = every_loss(given)
    own = given.lost_by_scale(given.rounded(found.encoding))
    torch.testing.assert_close(own, every.min(0).values, rtol=1e-6, atol=0)
    assert gained(given, found) == true_gain(every[-1], own)
    assert gained(given, found) >= 0
    assert found.weight is given.problem.weight
    torch.testing.assert_close(found.simulated_weight().double(), given.rounded(found.encoding))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["linear", "grouped"])
def test_refining_is_never_worse(name, setting):
    given = named(name, SETTINGS[setting], block=block_moments(name, setting))
    coarse, fine = (SeqMse(NUM, refine=refine).apply(given.problem) for refine in (False, True))
    own, before = (given.lost_by_scale(given.rounded(found.encoding)) for found in (fine, coarse))
    assert bool((own <= before * (1 + 1e-9)).all())
    now = given.lost_by_scale(given.rounded(given.problem.encoding))
    assert gained(given, fine) == true_gain(now, own)
    assert gained(given, fine) >= gained(given, coarse) > 0


def test_refining_tries_as_many_evenly_between_the_neighbours_of_the_best():
    given = named("linear", CHANNEL, noise=0.2)
    now, best = given.problem.encoding, (every_loss(given).argmin(0) + 1) / NUM
    steps = [2 * i / (NUM + 1) - 1 for i in range(1, NUM + 1)] + [0]
    tried = [fraction_of(now, best + step / NUM) for step in steps] + [now]
    losses = torch.stack([given.lost_by_scale(given.rounded(encoding)) for encoding in tried])
    found = SeqMse(NUM, refine=True).apply(given.problem)
    own = given.lost_by_scale(given.rounded(found.encoding))
    torch.testing.assert_close(own, losses.min(0).values, rtol=1e-6, atol=0)


def mixed_linear(weight, columns=16, rows=100, seed=0, **settings):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) @ torch.randn(columns, columns, generator=generator)
    module = nn.Linear(columns, 6)
    few_large_(module, generator)
    return case(layer_of(module, x, weight), module, x, **settings)


@pytest.mark.medium
@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(8))
def test_blocks_that_make_up_for_each_other_are_never_worse_for_the_whole_output(seed):
    given = mixed_linear(blocks_of(4), seed=seed)
    alone, joint = (SeqMse(NUM, joint=joint).apply(given.problem) for joint in (False, True))
    assert lost(given, joint) <= lost(given, alone) * (1 + 1e-9)
    assert lost(given, joint) < 0.95 * given.lost(given.rounded(given.problem.encoding))
    assert gained(given, joint) == true_gain(given.lost(given.rounded(given.problem.encoding)), lost(given, joint))


@pytest.mark.parametrize("name", ["conv", "grouped", "transposed", "transposed grouped"])
def test_blocks_of_convolutions_make_up_for_each_other(name):
    given = named(name, blocks_of(2))
    alone, joint = (SeqMse(NUM, joint=joint).apply(given.problem) for joint in (False, True))
    assert lost(given, joint) <= lost(given, alone) * (1 + 1e-9)
    assert gained(given, joint) == true_gain(given.lost(given.rounded(given.problem.encoding)), lost(given, joint))


@pytest.mark.medium
@pytest.mark.sample(4)
@pytest.mark.parametrize("weight", [CHANNEL, TENSOR, CHANNEL | {"symmetric": False}], ids=["channel", "tensor", "asym"])
@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize(("spread", "apart"), [(nn.init.uniform_, 1e-4), (nn.init.normal_, 1e-2)])
def test_estimates_find_what_the_errors_of_all_candidates_find(weight, noise, spread, apart):
    generator = torch.Generator().manual_seed(0)
    x = torch.relu(torch.randn(600, 256, generator=generator) @ torch.randn(256, 256, generator=generator) / 16)
    module = nn.Linear(256, 24)
    spread(module.weight, generator=generator)
    module.weight.data -= module.weight.data.mean()
    given = case(layer_of(module, x, weight), module, x, noise=noise, dtype=torch.float32)
    rough, exact = (SeqMse(20, exact=exact).apply(given.problem) for exact in (False, True))
    before = given.lost(given.rounded(given.problem.encoding))
    assert lost(given, rough) == pytest.approx(lost(given, exact), rel=apart)
    assert lost(given, exact) <= before
    for found in (rough, exact):
        assert gained(given, found) == true_gain(before, lost(given, found))


def powers_of_two(scale, _):
    return bool((torch.frexp(scale).mantissa == 0.5).all())


def multiples_of_one_unit(scale, present):
    """1 to 16 times a sixteenth of what was the channel's largest."""
    times = scale / (present.amax(1, keepdim=True) / 16)
    return bool(((times - times.round()).abs() < 1e-4).all() & (times.round() >= 1).all() & (times.round() <= 16).all())


def small_floats(scale, present):
    """E4M3 times the tensor's one float32, which is what was the largest over 448."""
    codes = scale.double() / (present.max().double() / 448)
    return bool(((codes.float() - round_to(codes.float(), DTYPES["fp8_e4m3"])).abs() <= 1e-5 * codes).all())


STORED = {
    "mxfp4": powers_of_two, "mxint8": powers_of_two, "mxfp6_e2m3": powers_of_two, "mxfp8_e4m3": powers_of_two,
    "lpbq_int4": multiples_of_one_unit, "nvfp4": small_floats,
}


@pytest.mark.medium
@pytest.mark.sample(3)
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("name", STORED)
def test_scales_stay_such_as_their_format_stores(name, joint):
    given = mixed_linear({"dtype": name}, 128, rows=300)
    present = given.problem.encoding.scale
    assert STORED[name](present, present)
    found = SeqMse(num_candidates=20, joint=joint, refine=True).apply(given.problem)
    assert STORED[name](found.encoding.scale, present)
    before, after = given.lost(given.problem.simulated_weight()), given.lost(found.simulated_weight())
    if joint:
        assert after <= before * (1 + 1e-9)
        assert gained(given, found) == true_gain(before, after)
    if name in ("mxfp4", "lpbq_int4", "nvfp4"):
        assert not torch.equal(found.encoding.scale, present)


@pytest.mark.medium
@pytest.mark.parametrize("name", STORED)
def test_no_stored_scale_is_worse_than_the_present(name):
    length = {"nvfp4": 16, "lpbq_int4": 64}.get(name, 32)
    given = mixed_linear({"dtype": name}, 128, rows=300, block=length)
    found = SeqMse(num_candidates=20).apply(given.problem)
    before, after = (given.lost_by_scale(state.simulated_weight()) for state in (given.problem, found))
    assert bool((after <= before * (1 + 1e-5)).all())  # the scales of nvfp4 are computed anew, and may be an ulp off
    assert gained(given, found) == true_gain(before, after)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(CalibrationError, match="num_candidates of seq_mse must be an integer from 1 to 10000, got 0"):
        SeqMse(num_candidates=0)
    with pytest.raises(ConfigError, match="num_candidates of seq_mse must be an integer from 1"):
        method("seq_mse(num_candidates=0)")


@pytest.mark.parametrize("refine", [False, True])
def test_one_candidate_is_the_present(refine):
    given = named("linear", CHANNEL)
    found = SeqMse(num_candidates=1, refine=refine).apply(given.problem)
    assert torch.equal(found.encoding.scale, given.problem.encoding.scale)
    assert found.loss[0] == found.loss[1]


def test_the_problem_stays_as_it_is():
    given = named("conv", blocks_of(2))
    error, scale = given.problem.error, given.problem.encoding.scale.clone()
    gram, linear = error.gram.clone(), error.linear.clone()
    SeqMse(NUM, refine=True, joint=True).apply(given.problem)
    assert torch.equal(given.problem.encoding.scale, scale)
    assert torch.equal(error.gram, gram)
    assert torch.equal(error.linear, linear)
    assert given.problem.loss is None
