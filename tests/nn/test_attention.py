"""Attention against torch's: the fused module bit for bit, the visible core within float rounding."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qtk.nn.attention import Attention, AttentionCore
from qtk.nn.tap import Tap

N, HEADS, L, S, E, EV = 2, 4, 5, 7, 8, 6
TOLERANCES = {torch.float32: 1e-6, torch.float64: 1e-12}
OFF = {"is_causal": False, "scale": None, "enable_gqa": False, "p": 0.0}


class Awake(Tap):
    idle = False
    repeatable = False


def tensors(dtype=torch.float32, *, key_heads=HEADS, keys=S, unbatched=False):
    """Query, key and value; 3-D without a batch."""
    torch.manual_seed(0)
    shapes = ((N, HEADS, L, E), (N, key_heads, keys, E), (N, key_heads, keys, EV))
    return [torch.randn(shape[1:] if unbatched else shape, dtype=torch.float64).to(dtype).requires_grad_()
            for shape in shapes]


def bools():
    """Every query sees one key at least."""
    torch.manual_seed(1)
    return (torch.rand(N, 1, L, S) < 0.5).index_fill(-1, torch.tensor([3]), True)


def blind():
    """One query of either batch entry sees no key."""
    mask = bools()
    mask[0, :, 2] = mask[1, :, 0] = False
    return mask


def as_numbers(mask, dtype):
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -math.inf)


def bias(dtype):
    torch.manual_seed(2)
    return torch.randn(L, S, dtype=torch.float64).to(dtype)


CASES = {
    "plain": ({}, {}, None),
    "unbatched": ({"unbatched": True}, {}, None),
    "bool_mask": ({}, {}, lambda dtype: bools()),
    "float_mask": ({}, {}, bias),
    "mask_with_infinities": ({}, {}, lambda dtype: as_numbers(bools(), dtype)),
    "blind_queries": ({}, {}, lambda dtype: blind()),
    "blind_queries_by_infinities": ({}, {}, lambda dtype: as_numbers(blind(), dtype)),
    "unbatched_mask": ({"unbatched": True}, {}, lambda dtype: bools()[0]),
    "causal": ({"keys": L}, {"is_causal": True}, None),
    "causal_with_more_keys": ({}, {"is_causal": True}, None),
    "causal_with_fewer_keys": ({"keys": L - 2}, {"is_causal": True}, None),
    "scale": ({}, {"scale": 0.7}, None),
    "shared_keys": ({"key_heads": 2}, {"enable_gqa": True}, None),
    "shared_keys_masked": ({"key_heads": 1}, {"enable_gqa": True, "scale": 0.3}, lambda dtype: bools()),
}


def case(name, dtype):
    """Inputs, options, mask and what torch makes of them."""
    shape, options, make = CASES[name]
    inputs, mask = tensors(dtype, **shape), make(dtype) if make else None
    return inputs, options, mask, F.scaled_dot_product_attention(*inputs, mask, **options)


def gradients(result, inputs):
    weights = torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view_as(result)
    return torch.autograd.grad((result * weights).sum(), inputs)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", CASES)
def test_the_core_equals_torch_with_gradients(name, dtype):
    inputs, options, mask, expected = case(name, dtype)
    found = AttentionCore(**OFF | options)(*inputs, mask)
    assert found.shape == expected.shape
    assert float((found - expected).detach().abs().max()) < TOLERANCES[dtype]
    for a, b in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        assert float((a - b).detach().abs().max()) < TOLERANCES[dtype] * max(1.0, float(b.abs().max())) * 4


@pytest.mark.parametrize("name", CASES)
def test_the_idle_module_is_torch_bit_for_bit_and_an_awake_one_its_core(name):
    inputs, options, mask, expected = case(name, torch.float32)
    module = Attention(**options)
    assert torch.equal(module(*inputs, mask), expected)
    core = module.core(*inputs, mask)
    module.core.add_module("awake", Awake())
    assert torch.equal(module(*inputs, mask), core)


def test_the_core_keeps_neither_scores_nor_weights_for_its_gradient():
    inputs, module = tensors(), Attention()
    module.core.add_module("awake", Awake())
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda value: shapes.append(value.shape[-2:]) or value, lambda x: x):
        module(*inputs)
        assert (L, S) in shapes
        module.core.awake.repeatable = True
        shapes.clear()
        result = module(*inputs)
    assert shapes
    assert (L, S) not in shapes
    expected = gradients(module.core(*inputs), inputs)
    assert all(torch.equal(a, b) for a, b in zip(gradients(result, inputs), expected, strict=True))


@pytest.mark.parametrize("mask", [blind(), as_numbers(blind(), torch.float32)], ids=["bool", "float"])
def test_a_query_that_sees_no_key_gets_zeros(mask):
    result = AttentionCore(**OFF)(*tensors(), mask)
    assert torch.equal(result[0, :, 2], torch.zeros(HEADS, EV))
    assert bool((result[0, :, 1] != 0).all())


@pytest.mark.parametrize("mask", [blind(), as_numbers(blind(), torch.float32)], ids=["bool", "float"])
def test_a_query_that_sees_no_key_gives_finite_gradients(mask):
    inputs = tensors()
    result = AttentionCore(**OFF)(*inputs, mask)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients(result, inputs))


@pytest.mark.parametrize("mask", [bools(), as_numbers(bools(), torch.float32)])
def test_scores_are_made_before_they_are_masked(mask):
    seen = []
    core = AttentionCore(**OFF | {"is_causal": True})
    core.scores.register_forward_hook(lambda module, args, out: seen.append(out))
    core(*tensors(), mask)
    assert len(seen) == 1
    assert bool(seen[0].isfinite().all())


def test_a_float_mask_that_is_trained_gets_its_gradient():
    inputs = tensors(torch.float64)
    found, expected = bias(torch.float64).requires_grad_(), bias(torch.float64).requires_grad_()
    (ours,) = gradients(AttentionCore(**OFF)(*inputs, found), [found])
    (torchs,) = gradients(F.scaled_dot_product_attention(*inputs, expected), [expected])
    assert float((ours - torchs).abs().max()) < 1e-12


@pytest.mark.parametrize("awake", [False, True])
def test_weights_are_dropped_in_train_mode_only(awake):
    module, inputs = Attention(p=0.5), tensors()
    if awake:
        module.core.add_module("awake", Awake())
    kept = F.scaled_dot_product_attention(*inputs).detach()
    assert torch.allclose(module.eval()(*inputs), kept, atol=1e-6)
    module.train()
    with torch.no_grad():
        drawn = torch.stack([module(*inputs) for _ in range(400)])
    assert not torch.equal(drawn[0], drawn[1])
    errors = (drawn.mean(0) - kept).abs() / (drawn.std(0) / 20)  # kept weights are scaled by 1/(1-p): no bias
    assert float(errors.max()) < 5  # standard errors; 480 values of a normal distribution stay below 4


def test_parts_can_be_called_as_they_say():
    module, inputs = Attention(is_causal=False, scale=0.5), tensors()
    ((path, (part, arguments)),) = module.parts(*inputs, bools()).items()
    assert module.get_submodule(path) is part
    expected = F.scaled_dot_product_attention(*inputs, bools(), scale=0.5)
    assert torch.allclose(part(*arguments), expected, atol=1e-6)


def test_the_repr_tells_apart_what_is_built_differently():
    built = [Attention(), Attention(is_causal=True), Attention(scale=2.0), Attention(enable_gqa=True), Attention(p=0.1)]
    assert len({repr(module) for module in built}) == len(built)  # captures are shared by it
    assert all(isinstance(module, nn.Module) for module in built)
