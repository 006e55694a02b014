"""A model that is simulated and trained with the kernels for GPUs computes what it does on the CPU.

On a pretended GPU (``tests/pretend_gpu.py``), where everything but qtk's ops is computed on the CPU: results and the
gradients of weights agree bit for bit, those of ranges within the rounding of float32 sums.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import qtk
from tests.invariants.test_no_waits import tiny_cnn
from tests.pretend_gpu import pretended_gpu, to_gpu
from tests.zoo.attention import TinyViT

for name in ("fake_quantize", "fake_quantize_dynamic", "statistics"):
    pytest.importorskip(f"qtk.kernels.gpu.{name}")
pytestmark = [
    pytest.mark.kernels,
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # of the interpreter
]

OF_SUMS = 25 * 4e-6
"""Of a gradient of a range: ``conformance.check_sums`` allows 4e-6 of the sizes of all terms, of which most cancel."""


def trained_step(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The result in eval and in train mode, and all gradients."""
    with torch.no_grad():
        found = {"eval": model.eval()(x)}
    found["train"] = model.train()(x)
    found["train"].square().mean().backward()
    return found | {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.medium
@pytest.mark.parametrize(("make", "learned", "options"), [
    (tiny_cnn, False, {}),
    (tiny_cnn, True, {}),
    (tiny_cnn, False, {"config": "onnxruntime"}),
    (tiny_cnn, True, {"weight_bits": 4, "activation_bits": 4}),
    (TinyViT, False, {"weight_bits": 4}),
    (TinyViT, True, {}),
], ids=lambda value: getattr(value, "__name__", str(value)))
def test_results_and_gradients_are_those_of_the_cpu(make, learned, options, monkeypatch):
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(4, 3, 8, 8)
    sims = [qtk.QuantSim(model, x, **options) for _ in range(2)]
    for sim in sims:
        sim.compute_encodings([x], progress=False)
        if learned:
            sim.learn_ranges()
    on_cpu, on_gpu = (sim.model for sim in sims)
    ranges = {id(parameter) for parameter in sims[0].range_parameters()} if learned else set()
    ranges = {name for name, parameter in on_cpu.named_parameters() if id(parameter) in ranges}
    torch.manual_seed(1)
    expected = trained_step(on_cpu, x)
    with pretended_gpu(monkeypatch) as gpu:
        to_gpu(on_gpu)
        torch.manual_seed(1)
        found = {name: value.host.detach() for name, value in trained_step(on_gpu, to_gpu(x)).items()}
        assert any("backward" in kernel for kernel in gpu.kernels)
    assert found.keys() == expected.keys()
    assert (len(ranges) > 0) == learned
    for name, value in expected.items():
        if name in ranges:
            torch.testing.assert_close(found[name], value, rtol=OF_SUMS, atol=OF_SUMS * float(value.abs().max()))
        else:
            assert torch.equal(found[name], value.detach()), name
