"""Scales that training has lost, read without waiting: the accelerator is a fake one, which answers late."""

import copy
import pickle

import pytest
import torch

from qtk.core.dtypes import dtype
from qtk.core.encoding import Encoding
from qtk.core.spec import QuantSpec
from qtk.errors import EncodingError
from qtk.quantizers import lost_range
from qtk.quantizers.lost_range import EVERY, DeferredRangeCheck
from qtk.quantizers.quantizer import Mode, Quantizer


class Accelerator:
    """Sends numbers that arrive ``delay`` reads later; counts what was sent."""

    def __init__(self, delay):
        self.delay, self.sent = delay, 0

    def send(self, scale):
        self.sent += 1
        numbers, reads = lost_range.ends(scale), 0

        def arrived():
            nonlocal reads
            reads += 1
            return numbers if reads > self.delay else None

        return arrived


@pytest.fixture(params=[0, 1, 40])
def accelerator(request, monkeypatch):
    fake = Accelerator(request.param)
    monkeypatch.setattr(lost_range, "send_to_host", fake.send)
    return fake


@pytest.mark.parametrize("lost", [0.0, -1.0, float("nan"), float("inf")])
def test_a_lost_scale_is_found_some_calls_later_and_named(accelerator, lost):
    look, scale = DeferredRangeCheck(), torch.tensor([0.5, 0.25])
    for _ in range(5):
        look.check("fc:out", scale)
    scale = torch.tensor([0.5, lost])

    def train():
        for _ in range(3 * EVERY + accelerator.delay):
            look.check("fc:out", scale)

    with pytest.raises(EncodingError, match=r"fc:out: a scale has become .* some steps ago, but must be positive"):
        train()


def test_a_good_scale_is_looked_at_once_in_a_while(accelerator):
    look = DeferredRangeCheck()
    for _ in range(4 * EVERY):
        look.check("fc:out", torch.tensor([0.5]))
    assert accelerator.sent == {0: 4, 1: 4, 40: 2}[accelerator.delay]


def test_what_is_on_its_way_is_not_copied(accelerator):
    look = DeferredRangeCheck()
    look.check("fc:out", torch.tensor([-1.0]))
    for twin in (copy.deepcopy(look), pickle.loads(pickle.dumps(look))):
        twin.check("fc:out", torch.tensor([0.5]))
        twin.check("fc:out", torch.tensor([0.5]))


def learning(scale=0.5):
    quantizer = Quantizer(QuantSpec(dtype("int8"), symmetric=True), site="fc:out")
    quantizer.load_encoding(Encoding(quantizer.spec, torch.tensor([scale])))
    quantizer.mode = Mode.SIMULATE
    quantizer.learn_range()
    return quantizer


def relearn(quantizer):
    quantizer.drop_encoding()
    quantizer.load_encoding(learning().encoding)
    quantizer.learn_range()


@pytest.mark.parametrize("repair", [
    lambda quantizer: quantizer.load_encoding(learning().encoding),
    lambda quantizer: quantizer.load_state_dict(learning().state_dict()),
    relearn,
], ids=["load_encoding", "load_state_dict", "drop and learn"])
def test_a_range_that_was_set_again_is_not_reported_for_what_it_was(accelerator, repair, monkeypatch):
    """Of several lost ranges one raises first; the user repairs all, and what is on its way of the others is old."""
    quantizer, x = learning(), torch.ones(3, requires_grad=True)
    monkeypatch.setattr(Quantizer, "_check_range", lambda self, scale: self._range_check.check(self.site, scale))
    with torch.no_grad():
        quantizer.scale_factor.fill_(-1.0)
    quantizer(x)
    repair(quantizer)
    for _ in range(3 * EVERY + accelerator.delay):
        quantizer(x)
    with torch.no_grad():
        quantizer.scale_factor.fill_(-1.0)

    def train():
        for _ in range(3 * EVERY + accelerator.delay):
            quantizer(x)

    with pytest.raises(EncodingError, match=r"fc:out: a scale has become -0\.5 some steps ago"):
        train()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_numbers_arrive_on_the_host():
    arrived = lost_range.send_to_host(torch.tensor([0.5, -2.0, 3.0], device="cuda"))
    torch.cuda.synchronize()
    assert arrived() == (-2.0, 3.0)
