import copy
import pickle

import pytest
import torch
from torch import nn

import qtk
from qtk.calibrators.min_max import MinMax as MinMaxScheme
from qtk.core.dtypes import dtype
from qtk.core.encoding import Encoding
from qtk.core.granularity import PerBlock, PerChannel, PerTensor
from qtk.core.spec import QuantSpec, ScaleFormat
from qtk.errors import CalibrationError, EncodingError, NotCalibratedError
from qtk.numerics.affine import fake_quantize
from qtk.observers.min_max import MinMax
from qtk.ops.gradient_scale import GradientScale
from qtk.ops.simulate import simulate
from qtk.quantizers.modes import caching
from qtk.quantizers.quantizer import Mode, Quantizer

WEIGHT = QuantSpec(dtype("int4"), PerChannel(0), symmetric=True)
OUTPUT = QuantSpec(dtype("uint8"))
BLOCKS = QuantSpec(dtype("int8"), PerBlock((1, 4)))


def encoding_of(spec, seed=0):
    shape = {WEIGHT: (3,), OUTPUT: (1,), BLOCKS: (3, 2)}[spec]
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(shape, generator=generator) * 0.1 + 0.1
    return Encoding(spec, scale, None if spec.symmetric else torch.randint(0, 9, shape, generator=generator).int())


def calibrated(spec, *, mode=Mode.SIMULATE, cache=False, seed=0):
    quantizer = Quantizer(spec, site="fc:out", cache=cache)
    quantizer.load_encoding(encoding_of(spec, seed))
    quantizer.mode = mode
    return quantizer


def reference(x, spec, seed=0):
    encoding = encoding_of(spec, seed)
    return fake_quantize(
        x, encoding.scale, encoding.zero_point, spec.granularity.block_size(x.ndim), spec.qmin, spec.qmax
    )


class Net(nn.Module):
    """A linear whose weight and output are quantized."""

    def __init__(self, mode=Mode.SIMULATE):
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.of_weight, self.of_output = calibrated(WEIGHT, cache=True), calibrated(OUTPUT)
        self.set_mode(mode)

    def set_mode(self, mode):
        for quantizer in (self.of_weight, self.of_output):
            quantizer.mode = mode
            quantizer.observer = MinMax(quantizer.spec.granularity) if mode is Mode.OBSERVE else None

    def forward(self, x):
        return self.of_output(nn.functional.linear(x, self.of_weight(self.linear.weight), self.linear.bias))


# --- modes


def test_bypass_and_observe_pass_the_very_tensor():
    x = torch.randn(3, 8)
    for spec in (WEIGHT, OUTPUT):
        quantizer = Quantizer(spec, site="fc:out")
        assert quantizer(x) is x
        quantizer.mode, quantizer.observer = Mode.OBSERVE, MinMax(spec.granularity)
        assert quantizer(x) is x
        assert quantizer.observer.count == 24


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("spec", [WEIGHT, OUTPUT, BLOCKS], ids=str)
def test_simulate_is_the_reference(spec, grad, cache):
    x = torch.randn(3, 8)
    quantizer = calibrated(spec, cache=cache)
    with torch.set_grad_enabled(grad):
        assert torch.equal(quantizer(x), reference(x, spec))
        assert torch.equal(quantizer(x), reference(x, spec))


@pytest.mark.parametrize("grad", [True, False])
def test_simulate_without_an_encoding_names_the_site(grad):
    quantizer = Quantizer(OUTPUT, site="blocks.0.fc:out", cache=True)
    quantizer.mode = Mode.SIMULATE
    with torch.set_grad_enabled(grad), pytest.raises(NotCalibratedError, match=r"blocks\.0\.fc:out"):
        quantizer(torch.zeros(3))


def test_observe_without_an_observer_and_broken_data_name_the_site():
    quantizer = Quantizer(OUTPUT, site="fc:out")
    quantizer.mode = Mode.OBSERVE
    with pytest.raises(CalibrationError, match="fc:out"):
        quantizer(torch.zeros(3))
    quantizer.observer = MinMax(PerTensor())
    with pytest.raises(CalibrationError, match="fc:out: 1 NaN"):
        quantizer(torch.tensor([torch.nan]))


# --- encodings


def test_what_is_loaded_is_what_is_given_back():
    for spec in (WEIGHT, OUTPUT, BLOCKS):
        assert Quantizer(spec, site="x").encoding is None
        assert calibrated(spec).encoding.equals(encoding_of(spec))


def test_an_encoding_is_copied_in_and_out():
    given = encoding_of(OUTPUT)
    quantizer = Quantizer(OUTPUT, site="fc:out")
    quantizer.load_encoding(given)
    taken = quantizer.encoding
    given.scale.mul_(2)
    taken.scale.mul_(3)
    taken.zero_point.add_(1)
    assert quantizer.encoding.equals(encoding_of(OUTPUT))


def test_an_encoding_of_another_spec_is_refused():
    quantizer = Quantizer(OUTPUT, site="fc:out")
    with pytest.raises(EncodingError, match=r"fc:out is uint8.*the encoding is int4"):
        quantizer.load_encoding(encoding_of(WEIGHT))
    assert quantizer.encoding is None


def test_a_frozen_quantizer_keeps_its_encoding():
    quantizer = calibrated(OUTPUT)
    quantizer.frozen = True
    for change in (lambda: quantizer.load_encoding(encoding_of(OUTPUT, 1)), quantizer.learn_range):
        with pytest.raises(EncodingError, match="fc:out is frozen"):
            change()
    assert quantizer.encoding.equals(encoding_of(OUTPUT))


def test_an_encoding_loaded_in_inference_mode_can_be_trained_with():
    with torch.inference_mode():
        quantizer = Quantizer(OUTPUT, site="fc:out")
        quantizer.load_encoding(encoding_of(OUTPUT))
    quantizer.mode = Mode.SIMULATE
    quantizer(torch.randn(3, requires_grad=True)).sum().backward()
    quantizer.learn_range()


# --- state_dict


def test_the_state_holds_numbers_only_when_there_are_some():
    assert Quantizer(OUTPUT, site="x").state_dict() == {}
    assert set(calibrated(OUTPUT).state_dict()) == {"scale", "zero_point"}
    assert set(calibrated(WEIGHT, cache=True).state_dict()) == {"scale"}


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("spec", [WEIGHT, OUTPUT, BLOCKS], ids=str)
def test_a_fresh_and_a_calibrated_quantizer_load_a_state(spec, fresh, assign):
    quantizer = Quantizer(spec, site="x") if fresh else calibrated(spec, seed=1)
    state = calibrated(spec).state_dict()
    quantizer.load_state_dict(state, assign=assign)
    assert quantizer.encoding.equals(encoding_of(spec))
    assert list(quantizer.state_dict()) == list(state)
    if not assign:
        state["scale"].mul_(2)
        assert quantizer.encoding.equals(encoding_of(spec))


def test_a_model_loads_strictly_and_says_what_is_missing_or_too_much():
    net, state = Net(), Net().state_dict()
    assert "of_output.zero_point" in state
    net.load_state_dict(state)
    fresh = Net()
    fresh.of_output = Quantizer(OUTPUT, site="fc:out")
    fresh.load_state_dict(state)
    assert fresh.of_output.encoding.equals(net.of_output.encoding)
    with pytest.raises(RuntimeError, match=r"Missing key.*of_output\.scale"):
        net.load_state_dict({key: value for key, value in state.items() if key != "of_output.scale"})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*of_output\.bogus"):
        net.load_state_dict({**state, "of_output.bogus": torch.ones(1)})
    del state["of_output.scale"], state["of_output.zero_point"]
    Net().load_state_dict(state, strict=False)


@pytest.mark.parametrize(("of", "into"), [(OUTPUT, WEIGHT), (WEIGHT, OUTPUT), (BLOCKS, OUTPUT)])
def test_a_state_of_another_spec_is_refused(of, into):
    quantizer = Quantizer(into, site="fc:out")
    with pytest.raises(RuntimeError, match="fc:out is"):
        quantizer.load_state_dict(calibrated(of).state_dict())
    assert quantizer.encoding is None


def test_a_state_of_another_shape_is_refused():
    state = {"scale": torch.ones(5)}
    with pytest.raises(RuntimeError, match="size mismatch"):
        calibrated(WEIGHT).load_state_dict(state)


def move(quantizer, *, factor=1.0, shift=0.0):
    """Moves a learned range as training would."""
    with torch.no_grad():
        quantizer.scale_factor.fill_(factor)
        if quantizer.zero_point_shift is not None:
            quantizer.zero_point_shift.fill_(shift)


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("spec", [WEIGHT, OUTPUT, BLOCKS], ids=str)
def test_a_fresh_quantizer_learns_on_from_a_learned_state(spec, assign):
    learned = calibrated(spec)
    learned.learn_range(GradientScale.NONE)
    move(learned, factor=1.25, shift=0.01)
    for other in (Quantizer(spec, site="x"), calibrated(spec, seed=1)):
        other.load_state_dict(learned.state_dict(), assign=assign)
        assert other.learns_range
        assert other.gradient_scale is GradientScale.NONE
        assert other.encoding.equals(learned.encoding)
        assert not other.encoding.equals(encoding_of(spec))
        assert other.state_dict().keys() == learned.state_dict().keys()


def test_a_learned_range_learns_on_from_a_fixed_state():
    learned, start = calibrated(OUTPUT), calibrated(OUTPUT, seed=1)
    learned.learn_range()
    held = learned.scale_factor
    move(learned, factor=1.5, shift=0.3)
    learned.load_state_dict(start.state_dict())
    assert learned.learns_range
    assert learned.scale_factor is held
    assert learned.encoding.equals(start.encoding)


def test_flags_are_part_of_the_state_where_they_are_set():
    quantizer, fresh = (Quantizer(WEIGHT, site="x", static=True) for _ in range(2))
    quantizer.load_encoding(encoding_of(WEIGHT))
    quantizer.frozen, quantizer.rewrote_weight, quantizer.momentum = True, True, 0.25
    fresh.load_state_dict(quantizer.state_dict())
    assert (fresh.frozen, fresh.rewrote_weight, fresh.momentum) == (True, True, 0.25)
    assert all(isinstance(value, torch.Tensor) for value in quantizer.state_dict().values())


def test_a_state_without_flags_takes_them_back_and_one_without_a_range_does_not():
    quantizer = calibrated(WEIGHT)
    before = quantizer.state_dict()
    quantizer.frozen = quantizer.rewrote_weight = True
    quantizer.load_state_dict({}, strict=False)
    assert (quantizer.frozen, quantizer.rewrote_weight) == (True, True)
    quantizer.load_state_dict(before)
    assert (quantizer.frozen, quantizer.rewrote_weight) == (False, False)


def test_what_a_schedule_sets_for_a_time_is_not_saved():
    quantizer, fresh = calibrated(OUTPUT), Quantizer(OUTPUT, site="x")
    quantizer.learn_range(GradientScale.NONE)
    quantizer.range_gradients_off, quantizer.momentum = True, 0.01
    fresh.load_state_dict(quantizer.state_dict())
    assert (fresh.range_gradients_off, fresh.momentum, fresh.gradient_scale) == (False, None, GradientScale.NONE)


def test_the_average_of_two_states_loads():
    states = []
    for seed in range(2):
        quantizer = Quantizer(WEIGHT, site="x", static=True)
        quantizer.load_encoding(encoding_of(WEIGHT, seed=seed))
        quantizer.learn_range(GradientScale.NONE)
        quantizer.rewrote_weight = True
        states.append(quantizer.state_dict())
    fresh = Quantizer(WEIGHT, site="x")
    fresh.load_state_dict({name: (value + states[1][name]) / 2 for name, value in states[0].items()})
    assert (fresh.rewrote_weight, fresh.frozen, fresh.gradient_scale) == (True, False, GradientScale.NONE)


def test_freezing_a_learned_range_fixes_it_unless_its_scale_is_lost():
    quantizer = calibrated(OUTPUT)
    quantizer.learn_range()
    move(quantizer, factor=1.25)
    before, parameters = quantizer.encoding, list(quantizer.parameters())
    quantizer.frozen = True
    assert quantizer.frozen
    assert not quantizer.learns_range
    for parameter in parameters:
        parameter.data.fill_(9.0)
    assert quantizer.encoding.equals(before)
    quantizer.frozen = False
    quantizer.learn_range()
    move(quantizer, factor=-1.0)
    with pytest.raises(EncodingError, match="a scale has become"):
        quantizer.frozen = True
    assert not quantizer.frozen


def test_states_with_integer_zero_points_load_and_averages_keep_their_fraction():
    quantizer, state = Quantizer(OUTPUT, site="x"), calibrated(OUTPUT).state_dict()
    for zero_point, code in ((torch.tensor([7], dtype=torch.int32), 7), (torch.tensor([2.5]), 2)):
        quantizer.load_state_dict({**state, "zero_point": zero_point})
        assert quantizer.zero_point.dtype == torch.float32
        assert quantizer.zero_point.item() == zero_point.item()
        assert quantizer.encoding.zero_point.tolist() == [code]


# --- moving


@pytest.mark.parametrize("move", [nn.Module.half, nn.Module.bfloat16, nn.Module.double], ids=lambda move: move.__name__)
@pytest.mark.parametrize("learned", [False, True])
def test_a_change_of_dtype_never_touches_the_numbers(move, learned):
    net = Net()
    if learned:
        net.of_output.learn_range()
    move(net)
    assert net.linear.weight.dtype != torch.float32
    assert net.of_output.scale.dtype == torch.float32
    assert net.of_output.encoding.equals(encoding_of(OUTPUT))
    assert net.of_weight.encoding.equals(encoding_of(WEIGHT))
    x = torch.randn(2, 8, dtype=net.linear.weight.dtype)
    assert net(x).dtype == x.dtype


def test_devices_follow():
    moved = Net().to("meta", torch.bfloat16)
    assert moved.of_output.scale.device.type == "meta"
    assert moved.of_output.scale.dtype == torch.float32
    assert moved.of_output.zero_point.device.type == "meta"


# --- the cache


def test_a_weight_is_quantized_once_inside_and_every_time_outside():
    quantizer, weight = calibrated(WEIGHT, cache=True), nn.Parameter(torch.randn(3, 8))
    with torch.no_grad(), caching(quantizer):
        first = quantizer(weight)
        with caching(quantizer):
            assert quantizer(weight) is first
        assert quantizer(weight) is first
        weight.mul_(1.5)
        assert torch.equal(quantizer(weight), reference(weight, WEIGHT))
        quantizer.load_encoding(encoding_of(WEIGHT, 1))
        assert torch.equal(quantizer(weight), reference(weight, WEIGHT, 1))
    with torch.no_grad():
        assert quantizer(weight) is not quantizer(weight)


@pytest.mark.parametrize("fused", [False, True])
def test_nothing_written_by_a_user_goes_unnoticed(fused):
    """Averaged weights put in through ``.data`` and taken out again, between two evaluations; a fused optimizer."""
    quantizer, weight = calibrated(WEIGHT, cache=True), nn.Parameter(torch.randn(3, 8))
    with torch.no_grad():
        for factor in (1.5, 0.5):
            quantizer(weight)
            weight.data.mul_(factor)
            assert torch.equal(quantizer(weight), reference(weight, WEIGHT))
    optimizer = torch.optim.AdamW([weight], lr=0.5, fused=fused)
    quantizer(weight).square().sum().backward()
    with torch.no_grad():
        quantizer(weight)
    optimizer.step()
    with torch.no_grad():
        assert torch.equal(quantizer(weight), reference(weight, WEIGHT))


def test_only_a_quantizer_that_is_asked_to_caches():
    quantizer, x = calibrated(OUTPUT), torch.randn(4)
    with torch.no_grad(), caching(quantizer):
        assert quantizer(x) is not quantizer(x)


# --- learned ranges


def test_learned_ranges_are_parameters_that_act_as_they_will_be_exported():
    quantizer, x = calibrated(OUTPUT), torch.randn(64)
    quantizer.learn_range()
    quantizer.learn_range()
    assert {name for name, _ in quantizer.named_parameters()} == {"scale_factor", "zero_point_shift"}
    assert torch.equal(quantizer(x), reference(x, OUTPUT))
    for factor, shift in ((1.3, 0.31), (0.01, 2.0), (7.0, -3.0)):
        move(quantizer, factor=factor, shift=shift)
        encoding = quantizer.encoding
        assert torch.equal(quantizer(x), fake_quantize(x, encoding.scale, encoding.zero_point, (), 0, 255))
    move(quantizer, factor=2.0, shift=10 / 255)
    start = encoding_of(OUTPUT)
    assert torch.equal(quantizer.encoding.scale, 2 * start.scale)
    assert quantizer.encoding.zero_point.item() == start.zero_point.item() + 10


@pytest.mark.parametrize("start", [-0.1, 0.0, 0.05])
def test_learned_ranges_train_from_anywhere_with_one_learning_rate(start):
    quantizer, x = calibrated(OUTPUT), torch.linspace(-3, 9, 200)
    quantizer.load_encoding(Encoding(OUTPUT, torch.tensor([0.015]), torch.tensor([9], dtype=torch.int32)))
    quantizer.learn_range()
    move(quantizer, shift=start)
    optimizer = torch.optim.Adam(quantizer.parameters(), lr=0.05)
    losses = []
    for _ in range(200):
        loss = (quantizer(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.02 * losses[0]


@pytest.mark.parametrize("value", [0.0, -0.5, torch.nan, torch.inf])
def test_a_scale_that_is_lost_in_training_is_an_error_that_names_the_site(value):
    quantizer = calibrated(OUTPUT)
    quantizer.learn_range()
    move(quantizer, factor=value)
    for use in (lambda: quantizer(torch.randn(3)), lambda: quantizer.encoding, quantizer.fix_range):
        with pytest.raises(EncodingError, match=r"fc:out: a scale has become .*lower learning rate"):
            use()
    assert quantizer.learns_range


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("spec", [WEIGHT, OUTPUT], ids=str)
def test_gradients_are_those_of_autograd_times_that_of_lsq(spec, static):
    """LSQ, section 2.2: 1 / √(N · q_max); in blocks and channels N counts what shares a scale."""
    x, upstream = torch.randn(3, 8) * 3, torch.randn(3, 8)
    quantizer = Quantizer(spec, site="fc:out", static=static)
    quantizer.load_encoding(encoding_of(spec))
    quantizer.mode = Mode.SIMULATE
    found = {}
    for how in (*GradientScale, "held"):
        quantizer.range_gradients_off = how == "held"
        quantizer.learn_range(GradientScale.LSQ if quantizer.range_gradients_off else how)
        quantizer(x).backward(upstream)
        found[how] = [parameter.grad.clone() for parameter in quantizer.parameters()]
        quantizer.zero_grad()
    scale, zero = encoding_of(spec).scale, encoding_of(spec).zero_point
    factor, shift = torch.ones_like(scale, requires_grad=True), torch.zeros_like(scale, requires_grad=True)
    zero = None if zero is None else zero + 255 * shift
    op = simulate(x, spec, scale * factor, zero)
    expected = torch.autograd.grad(op, [factor] if zero is None else [factor, shift], upstream)
    elements = (24 if static else 8) / scale.numel()
    lsq = 1 / (max(elements, 1) * spec.qmax) ** 0.5
    for how, scaled_by in ((GradientScale.NONE, 1.0), (GradientScale.LSQ, lsq), ("held", 0.0)):
        for own, other in zip(found[how], expected, strict=True):
            torch.testing.assert_close(own, other * scaled_by)


def test_a_held_range_costs_as_little_as_a_fixed_one():
    x, sizes = torch.randn(4, 100, requires_grad=True), {}

    def run(quantizer):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each) or each, lambda each: each):
            result = quantizer(x * 1)
        sizes[quantizer] = sum(each.nbytes for each in kept)
        return result

    fixed, held = calibrated(OUTPUT), calibrated(OUTPUT)
    held.learn_range()
    held.range_gradients_off = True
    run(fixed)
    run(held).backward(torch.full((4, 100), torch.inf))
    assert sizes[held] == sizes[fixed]
    assert all(not parameter.grad.any() for parameter in held.parameters())


def test_a_fixed_range_is_a_valid_encoding_in_buffers():
    quantizer = calibrated(OUTPUT)
    quantizer.learn_range()
    move(quantizer, factor=1.5, shift=0.011)
    before = quantizer.encoding
    quantizer.fix_range()
    assert not list(quantizer.parameters())
    assert quantizer.encoding.equals(before)
    assert quantizer.zero_point.item() == round(quantizer.zero_point.item())
    assert set(dict(quantizer.named_buffers())) == {"scale", "zero_point"}


@pytest.mark.parametrize("spec", [WEIGHT, OUTPUT, BLOCKS], ids=str)
def test_a_range_that_follows_its_tensor_is_that_of_min_max(spec):
    quantizer, x = calibrated(spec), torch.randn(3, 8)
    quantizer.momentum = 1.0
    expected = MinMaxScheme().encodings([observed(x, spec)], [spec])[0]
    quantizer.eval()
    assert torch.equal(quantizer(x), reference(x, spec))
    quantizer.train()
    first = quantizer(x.clone().requires_grad_())
    assert quantizer.encoding.equals(expected)
    quantizer(2 * x)
    first.sum().backward()  # what it needs was not overwritten by the second forward pass
    assert torch.equal(quantizer.encoding.scale, 2 * expected.scale)
    quantizer(torch.full((3, 8), torch.nan))
    assert torch.equal(quantizer.encoding.scale, 2 * expected.scale)
    quantizer.frozen = True
    quantizer(x)
    assert torch.equal(quantizer.encoding.scale, 2 * expected.scale)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_a_range_does_not_follow_an_empty_tensor(shape):
    quantizer = calibrated(OUTPUT)
    quantizer.momentum, before = 0.5, quantizer.encoding
    assert quantizer(torch.ones(shape)).shape == shape
    assert quantizer.encoding.equals(before)


@pytest.mark.medium
def test_a_range_that_follows_slowly_keeps_fractions_of_a_zero_point():
    quantizer, x = calibrated(OUTPUT), torch.linspace(-3, 9, 50)
    quantizer.momentum = 0.01
    for _ in range(1000):
        quantizer(x)
    expected = MinMaxScheme().encodings([observed(x, OUTPUT)], [OUTPUT])[0]
    torch.testing.assert_close(quantizer.encoding.scale, expected.scale, rtol=1e-3, atol=0)
    assert torch.equal(quantizer.encoding.zero_point, expected.zero_point)


def observed(x, spec):
    observer = MinMax(spec.granularity)
    observer.observe(x)
    return observer


def test_there_is_nothing_to_learn_from_without_an_encoding():
    with pytest.raises(NotCalibratedError, match="fc:out"):
        Quantizer(OUTPUT, site="fc:out").learn_range()


def test_an_encoding_loaded_into_a_learned_range_is_learned_on_by_the_same_parameters():
    quantizer = calibrated(OUTPUT)
    quantizer.learn_range()
    before = list(quantizer.parameters())
    move(quantizer, factor=1.5, shift=0.2)
    quantizer.load_encoding(encoding_of(OUTPUT, 1))
    assert all(a is b for a, b in zip(quantizer.parameters(), before, strict=True))
    assert quantizer.encoding.equals(encoding_of(OUTPUT, 1))


# --- the module as a part of others


@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["copy", "pickle"])
def test_a_copy_is_the_same_and_independent(mode, copied):
    net, x = Net(mode), torch.randn(2, 8)
    with torch.no_grad():
        expected = net(x)
        other = copied(net)
        assert torch.equal(other(x), expected)
    if mode is Mode.OBSERVE:
        assert other.of_output.observer.count == 2 * net.of_output.observer.count
    other.of_output.load_encoding(encoding_of(OUTPUT, 1))
    assert net.of_output.encoding.equals(encoding_of(OUTPUT))


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)
def test_compiled_without_a_break_it_is_the_same(mode, grad):
    torch._dynamo.reset()
    net, x = Net(mode), torch.randn(2, 8)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    with torch.set_grad_enabled(grad):
        expected = net(x)
        assert torch.equal(compiled(x), expected)
        if mode is Mode.OBSERVE:
            eager, both = MinMax(PerTensor()), net.of_output.observer
            eager.observe(expected)
            assert both.count == 2 * eager.count
            assert torch.equal(both.minimum, eager.minimum)
            compiled(x + 1)
            assert both.count == 3 * eager.count


@pytest.mark.medium
def test_compiled_code_follows_a_new_encoding_and_mode():
    torch._dynamo.reset()
    net, x = Net(), torch.randn(2, 8)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        compiled(x)
        net.of_output.load_encoding(encoding_of(OUTPUT, 1))
        assert torch.equal(compiled(x), net(x))
        net.set_mode(Mode.BYPASS)
        assert torch.equal(compiled(x), net.linear(x))


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("mode", Mode, ids=lambda mode: mode.value)
def test_exported_it_is_the_same_at_any_batch_size(mode, learned):
    net = Net(mode).eval()
    if learned:
        net.of_output.learn_range()
    program = torch.export.export(net, (torch.randn(2, 8),), dynamic_shapes=({0: torch.export.Dim.AUTO},))
    x = torch.randn(5, 8)
    assert torch.equal(program.module()(x), net(x))
    own = [node.target for node in program.graph.nodes if str(node.target).startswith("qtk.")]
    assert own == [torch.ops.qtk.fake_quantize.default] * (2 if mode is Mode.SIMULATE else 0)


def test_its_line_in_a_printed_model_says_site_spec_and_mode():
    assert repr(calibrated(OUTPUT)) == "Quantizer(fc:out: uint8 per_tensor asymmetric, simulate)"


def test_scales_in_few_bits_are_not_learned():
    spec = QuantSpec(dtype("fp4_e2m1"), PerBlock((1, 4)), symmetric=True, scale_format=ScaleFormat.E8M0)
    quantizer = Quantizer(spec, site="fc.weight")
    quantizer.load_encoding(Encoding(spec, torch.ones(2, 2)))
    with pytest.raises(EncodingError, match=r"fc\.weight stores its scales as e8m0"):
        quantizer.learn_range()


def test_a_small_float_is_simulated():
    spec = QuantSpec(dtype("fp4_e2m1"), symmetric=True)
    quantizer = Quantizer(spec, site="fc:out")
    quantizer.load_encoding(Encoding(spec, torch.tensor([0.5])))
    quantizer.mode = Mode.SIMULATE
    x = torch.tensor([0.3, -1.7, 9.0], requires_grad=True)
    result = quantizer(x)
    assert result.tolist() == [0.25, -1.5, 3.0]
    result.sum().backward()
    assert x.grad.tolist() == [1, 1, 0]


@pytest.mark.parametrize("name", ["bitwidth", "spec", "symmetric", "enabled", "site"])
def test_attributes_that_nothing_reads_are_refused_with_the_right_way(name):
    quantizer = Quantizer(QuantSpec(dtype("int8"), symmetric=True), site="fc.weight")
    before = dict(vars(quantizer))
    with pytest.raises(EncodingError, match=rf"^fc.weight: setting '{name}' would have no .* rule of the config"):
        setattr(quantizer, name, QuantSpec(dtype("int4"), symmetric=True))
    assert vars(quantizer) == before


def test_a_mode_is_a_mode():
    quantizer = Quantizer(QuantSpec(dtype("int8"), symmetric=True), site="fc.weight")
    with pytest.raises(EncodingError, match=r"fc.weight: mode must be a qtk.Mode, BYPASS, .* got 'simulate'"):
        quantizer.mode = "simulate"
    assert quantizer.mode is Mode.BYPASS


def test_libraries_may_wrap_forward():
    sim = qtk.QuantSim(nn.Linear(4, 2), torch.randn(3, 4))
    sim.compute_encodings([torch.randn(3, 4)], progress=False)
    quantizer, seen = sim.quantizers["input:input"], []
    original = quantizer.forward
    quantizer.forward = lambda *args: seen.append(args) or original(*args)
    sim.model(torch.randn(3, 4))
    assert len(seen) == 1


def test_it_may_be_called_again_unless_it_observes_or_moves_its_range():
    quantizer = calibrated(WEIGHT)
    assert quantizer.repeatable
    quantizer.momentum = 0.9
    assert not quantizer.repeatable
    assert not calibrated(OUTPUT, mode=Mode.OBSERVE).repeatable
