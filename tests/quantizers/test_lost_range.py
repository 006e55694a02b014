"""Scales that training has lost, read without waiting: the accelerator is a fake one, which answers late."""

import copy
import pickle

import pytest
import torch

from qtk.errors import EncodingError
from qtk.quantizers import lost_range
from qtk.quantizers.lost_range import EVERY, LateLook


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
    look, scale = LateLook(), torch.tensor([0.5, 0.25])
    for _ in range(5):
        look.look("fc:out", scale)
    scale = torch.tensor([0.5, lost])

    def train():
        for _ in range(3 * EVERY + accelerator.delay):
            look.look("fc:out", scale)

    with pytest.raises(EncodingError, match=r"fc:out: a scale has become .* some steps ago, but must be positive"):
        train()


def test_a_good_scale_is_looked_at_once_in_a_while(accelerator):
    look = LateLook()
    for _ in range(4 * EVERY):
        look.look("fc:out", torch.tensor([0.5]))
    assert accelerator.sent == {0: 4, 1: 4, 40: 2}[accelerator.delay]


def test_what_is_on_its_way_is_not_copied(accelerator):
    look = LateLook()
    look.look("fc:out", torch.tensor([-1.0]))
    for twin in (copy.deepcopy(look), pickle.loads(pickle.dumps(look))):
        twin.look("fc:out", torch.tensor([0.5]))
        twin.look("fc:out", torch.tensor([0.5]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_numbers_arrive_on_the_host():
    arrived = lost_range.send_to_host(torch.tensor([0.5, -2.0, 3.0], device="cuda"))
    torch.cuda.synchronize()
    assert arrived() == (-2.0, 3.0)
