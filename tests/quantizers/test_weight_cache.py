import copy
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from qtk.quantizers.weight_cache import WeightCache


class Counted:
    """Doubles, and counts how often."""

    def __init__(self):
        self.calls = 0

    def __call__(self, weight):
        self.calls += 1
        return weight * 2


@pytest.fixture
def setting():
    weight, scale, zero_point = nn.Parameter(torch.randn(4, 3)), torch.rand(4) + 0.1, torch.zeros(4, dtype=torch.int32)
    cache = WeightCache()
    cache.enabled = True
    return cache, Counted(), weight, scale, zero_point


def test_it_remembers_while_nothing_changes(setting):
    cache, double, *tensors = setting
    first = cache.get(double, *tensors)
    assert cache.get(double, *tensors) is first
    assert double.calls == 1
    assert not first.requires_grad


def change_in_place(weight, scale, zero):
    with torch.no_grad():
        weight.mul_(2)
    return weight, scale, zero


CHANGES = {
    "weight in place": change_in_place,
    "weight in inference mode": lambda w, s, z: torch.inference_mode()(change_in_place)(w, s, z),
    "scale in place": lambda w, s, z: (w, s.mul_(2), z),
    "zero point in place": lambda w, s, z: (w, s, z.add_(1)),
    "another weight": lambda w, s, z: (nn.Parameter(w.detach() + 1), s, z),
    "another scale": lambda w, s, z: (w, s + 1, z),
    "no zero point": lambda w, s, z: (w, s, None),
    "weight.data": lambda w, s, z: (setattr(w, "data", w.data + 1), (w, s, z))[1],
    "a view": lambda w, s, z: (w.t(), s, z),
    "dtype": lambda w, s, z: (w.half(), s, z),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_it_forgets_when_anything_changes(setting, change):
    cache, double, *tensors = setting
    cache.get(double, *tensors)
    tensors = change(*tensors)
    result = cache.get(double, *tensors)
    assert double.calls == 2
    assert torch.equal(result, tensors[0] * 2)


def test_no_other_weight_can_come_to_lie_at_the_address_of_a_computed_one(setting):
    cache, double, _, scale, zero = setting
    weight = torch.randn(1000, 1000)  # so large that the allocator gives its memory straight to the next
    with torch.no_grad():
        for _ in range(3):
            computed = weight * 3
            address = computed.data_ptr()
            cache.get(double, computed, scale, zero)
            del computed
            others = [weight * 4 for _ in range(3)]
            assert address not in {other.data_ptr() for other in others}
            for other in others:
                assert torch.equal(cache.get(double, other, scale, zero), weight * 8)


def test_a_result_that_somebody_wrote_into_is_not_given_out_again(setting):
    cache, double, *tensors = setting
    cache.get(double, *tensors).zero_()
    assert torch.equal(cache.get(double, *tensors), tensors[0] * 2)


def test_a_result_from_inference_mode_is_an_ordinary_tensor(setting):
    cache, double, *tensors = setting
    with torch.inference_mode():
        assert not cache.get(double, *tensors).is_inference()
    with torch.no_grad():
        cache.get(double, *tensors)
    assert double.calls == 1


def test_inference_fake_and_traced_tensors_are_never_kept(setting):
    cache, double, weight, scale, zero = setting
    with torch.inference_mode():
        cache.get(double, weight.clone(), scale, zero)
    with FakeTensorMode() as mode:
        cache.get(double, mode.from_tensor(weight), mode.from_tensor(scale), mode.from_tensor(zero))
    with torch.no_grad():
        graph = make_fx(lambda w: cache.get(double, w, scale, zero))(weight)
        cache.get(double, weight, scale, zero)
        again = make_fx(lambda w: cache.get(double, w, scale, zero))(weight)
    torch.vmap(lambda row: cache.get(double, row, scale, zero))(weight)
    for traced in (graph, again):
        assert torch.equal(traced(weight + 1), (weight + 1) * 2)
    assert double.calls == 6


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_is_empty(setting, copied):
    cache, double, *tensors = setting
    cache.get(double, *tensors)
    copied(cache).get(double, *tensors)
    assert double.calls == 2


def test_clear(setting):
    cache, double, *tensors = setting
    cache.get(double, *tensors)
    cache.clear()
    cache.get(double, *tensors)
    assert double.calls == 2
