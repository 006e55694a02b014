"""The host never waits for a GPU while a model is observed, simulated and trained, and a few times for a calibration.

On a pretended GPU (``tests/pretend_gpu.py``), which records what the host would wait for, and with the numbers of a
calibration on the CPU as the oracle.
"""

from __future__ import annotations

import warnings
from collections import Counter

import pytest
import torch
from torch import nn

import qtk
from qtk.core.granularity import PerChannel, PerTensor
from qtk.observers.min_max import MinMax
from tests.pretend_gpu import OnGpu, Pretending, Wait, pretended_gpu, to_gpu
from tests.zoo.attention import TinyViT

for name in ("candidate_errors", "fake_quantize", "fake_quantize_dynamic", "statistics"):
    pytest.importorskip(f"qtk.kernels.gpu.{name}")
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of the interpreter

AT_THE_END = 14
"""Waits of a calibration, whatever the number of sites: for the parameters, the counts, the ranges, the check."""
V1_A_SITE = 8
"""More for each site of tf_enhanced(variant='v1'), which is searched by itself: a stand-in for an older library."""
BATCHES = 3


def tiny_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 4),
    )


class Batches:
    """Batches that note the waits between each and the next, or the end."""

    def __init__(self, gpu: Pretending, x: torch.Tensor) -> None:
        self.gpu, self.x = gpu, x
        self.seen = 0
        self.waits: list[Wait] = []

    def __iter__(self):
        for _ in range(BATCHES):
            before = len(self.gpu.waits)
            yield self.x
            self.seen += 1
            self.waits += self.gpu.waits[before:]


def on_gpu(make, scheme="min_max", **options):
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(4, 3, 8, 8)
    return qtk.QuantSim(model, x, scheme=scheme, **options), x


SCHEMES = (*qtk.SCHEMES,)
SLOW_SCHEMES = ("mse", "activation_mse")
"""Hundreds of candidates, each a launch in Triton's interpreter."""


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize(("make", "scheme", "options"), [
    *((tiny_cnn, scheme, {}) for scheme in SCHEMES if scheme not in SLOW_SCHEMES),
    *(pytest.param(tiny_cnn, scheme, {}, marks=pytest.mark.kernels) for scheme in SLOW_SCHEMES),
    (tiny_cnn, "tf_enhanced", {"config": "onnxruntime"}),  # int32 biases
    pytest.param(TinyViT, "min_max", {}, marks=pytest.mark.kernels),
    pytest.param(tiny_cnn, "tf_enhanced(variant='v1')", {}, marks=pytest.mark.slow),
])
def test_a_calibration_waits_a_few_times_at_its_end_and_never_in_a_batch(make, scheme, options, monkeypatch):
    sim, x = on_gpu(make, scheme, **options)
    expected, _ = on_gpu(make, scheme, **options)
    expected.compute_encodings([x] * BATCHES, progress=False)
    with pretended_gpu(monkeypatch) as gpu:
        to_gpu(sim.model)
        gpu.waits.clear()
        batches = Batches(gpu, to_gpu(x))
        sim.compute_encodings(batches, progress=False)
        assert batches.seen == BATCHES
        assert Counter(batches.waits) == {}
        allowed = AT_THE_END + (V1_A_SITE * len(sim.quantizers) if "v1" in scheme else 0)
        assert len(gpu.waits) <= allowed, Counter(gpu.waits)
        assert len(gpu.kernels) > len(sim.quantizers)
        found = {name: (encoding.scale.host, encoding.zero_point) for name, encoding in sim.encodings().items()}
    for name, encoding in expected.encodings().items():
        torch.testing.assert_close(found[name][0], encoding.scale, rtol=1e-6, atol=0)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("granularity", [PerTensor(), PerChannel(1)], ids=str)
def test_a_batch_is_observed_in_one_launch(granularity, monkeypatch):
    observer, expected = MinMax(granularity), MinMax(granularity)
    batches = [torch.randn(4, 3, 8, 8) for _ in range(BATCHES)]
    with pretended_gpu(monkeypatch) as gpu:
        observer.observe(to_gpu(batches[0]))
        gpu.ops.clear()
        gpu.kernels.clear()
        for x in map(to_gpu, batches[1:]):
            observer.observe(x)
        assert gpu.kernels == ["extremes_kernel"] * (BATCHES - 1)
        computes_nothing = {"aten::detach", "aten::view", "aten::new_empty", "aten::zeros"}  # the last for tickets
        assert set(gpu.ops) <= computes_nothing
        assert gpu.waits == []
        found = [observer.minimum.host, observer.maximum.host, observer.count]
    for x in batches:
        expected.observe(x)
    assert torch.equal(found[0], expected.minimum)
    assert torch.equal(found[1], expected.maximum)
    assert found[2] == expected.count


@pytest.mark.medium
@pytest.mark.parametrize("make", [tiny_cnn, pytest.param(TinyViT, marks=pytest.mark.kernels)])
def test_simulating_and_training_never_wait(make, monkeypatch):
    sim, x = on_gpu(make)
    sim.compute_encodings([x], progress=False)
    with pretended_gpu(monkeypatch) as gpu, warnings.catch_warnings():
        to_gpu(sim.model)
        x = to_gpu(x)
        gpu.waits.clear()
        gpu.kernels.clear()
        with torch.no_grad():
            assert isinstance(sim.model(x), OnGpu)
        assert Counter(gpu.waits) == {}, "a simulated forward"
        assert sum("forward" in kernel for kernel in gpu.kernels) == len(sim.quantizers), "one launch a quantizer"
        for learned in (False, True):
            if learned:
                sim.learn_ranges()
                assert Counter(gpu.waits) == {}, "learn_ranges"
            sim.model.train()
            optimizer = torch.optim.SGD(sim.model.parameters(), lr=1e-3)
            for _ in range(2):
                optimizer.zero_grad()
                sim.model(x).square().mean().backward()
                optimizer.step()
            assert Counter(gpu.waits) == {}, f"training, {learned=}"
        assert all(parameter.grad is not None for parameter in sim.range_parameters())


@pytest.mark.medium
def test_weights_that_follow_and_dynamic_ranges_never_wait(monkeypatch):
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    following = qtk.QuantSim(tiny_cnn().eval(), x)
    following.compute_encodings([x], progress=False)
    following.track_weights()
    with pretended_gpu(monkeypatch) as gpu:
        to_gpu(following.model)
        x = to_gpu(x)
        gpu.waits.clear()
        following.model.train()
        following.model(x).sum().backward()
        assert Counter(gpu.waits) == {}


@pytest.mark.parametrize("waiting", [
    lambda x: x.sum().item(), lambda x: x.tolist(), lambda x: bool((x > 0).any()), lambda x: float(x.max()),
    lambda x: x.cpu(), lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: torch.equal(x, x), lambda x: x.unique(),
    lambda x: torch.tensor([1.0], device=x.device), lambda x: x.long().bincount(), lambda x: x.to("cpu").sum(),
    lambda x: torch.ones(3).to(x.device), lambda x: torch.empty(3).copy_(x), lambda x: torch.where(x > 0),
    lambda x: torch.empty(3, pin_memory=True).copy_(x), lambda x: torch.empty(3).copy_(x, non_blocking=True),
], ids=range(17))
def test_what_waits_is_recorded(waiting, monkeypatch):
    with pretended_gpu(monkeypatch) as gpu:
        x = to_gpu(torch.tensor([1.0, 2.0, 0.0]))
        assert gpu.waits == []
        waiting(x)
        assert len(gpu.waits) == 1
        assert gpu.waits[0].place.startswith("tests/invariants/test_no_waits.py")


def test_what_does_not_wait_is_not(monkeypatch):
    with pretended_gpu(monkeypatch) as gpu:
        x = to_gpu(torch.tensor([1.0, 2.0, 0.0]))
        x.masked_fill(x > 1, 0.0).add_(torch.zeros(3, device=x.device)).where(x > 0, 3.0)
        x[x > 1] = 0.0
        torch.empty(3, pin_memory=True).copy_(x, non_blocking=True)
        torch.ones(3, pin_memory=True).to(x.device, non_blocking=True)
        torch.full((2,), 3.0, device=x.device).cumsum(0)
        assert gpu.waits == []
