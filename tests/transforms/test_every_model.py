"""Every transform keeps the function of every model, outlier channels planted: 1e-4 in float32, 1e-10 in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import qtk
from qtk.graph.graphs import graphs
from qtk.operators.targets import batch_norm_called
from qtk.quantizers.modes import in_mode
from qtk.transforms.result import TransformResult
from tests.zoo.models import ZOO
from tests.zoo.prepared import copied

LIVE = {"version": 1, "extends": "default", "fold_batch_norms": False}

TRANSFORMS: dict[str, Callable[[qtk.QuantSim, object], TransformResult]] = {
    "fold_batch_norms": lambda sim, batch: qtk.fold_batch_norms(sim),
    "equalize": lambda sim, batch: qtk.equalize_model(sim),
    "smooth_quant": lambda sim, batch: qtk.apply_smooth_quant(sim, [batch], progress=False),
}

TIMM = (
    "vit_tiny_patch16_224", "deit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "convnext_atto",
    "mobilenetv3_small_100", "efficientnet_b0", "resnet18", "regnetx_002", "mixer_s32_224",
    "maxvit_rmlp_pico_rw_256", "densenet121", "repvit_m0_9",
)
FIXED_SIZE = ("vit", "deit", "swin", "mixer", "maxvit")
"""Families whose images have one size."""


def with_outliers(model: nn.Module) -> nn.Module:
    """Batch norm statistics drawn at random, and two channels of every norm and convolution much larger than others."""
    generator = torch.Generator().manual_seed(0)

    def normal(tensor: Tensor, scale: float) -> Tensor:
        return torch.randn(tensor.shape, generator=generator).to(tensor) * scale

    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) and module.running_mean is not None:
                module.running_mean.copy_(normal(module.running_mean, 0.2))
                module.running_var.copy_(normal(module.running_var, 0.3).exp())
            if isinstance(module, nn.LayerNorm | nn.BatchNorm2d) and module.weight is not None:
                module.weight[:2] *= 20
    return model.eval()


def relative(expected: object, actual: object) -> float:
    """Largest change of a float output, relative to its largest value."""
    worst = 0.0
    for a, b in zip(pytree.tree_leaves(expected), pytree.tree_leaves(actual), strict=True):
        if isinstance(a, Tensor) and a.is_floating_point() and a.numel():
            finite = torch.isfinite(a)
            assert torch.equal(finite, torch.isfinite(b))
            size = float(a[finite].abs().max()) if finite.any() else 0.0
            gap = float((a[finite] - b[finite]).abs().max()) if finite.any() else 0.0
            worst = max(worst, gap / size if size else gap)
    return worst


def call(model: nn.Module, inputs: object) -> object:
    if isinstance(inputs, Tensor):
        return model(inputs)
    return model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def check(model: nn.Module, inputs: object, other: object, tolerance: float) -> dict[str, TransformResult]:
    """Applies all transforms one after the other, and compares the float function after each."""
    with torch.no_grad():
        expected = call(copy.deepcopy(model), other)
    sim = qtk.QuantSim(model, inputs, config=LIVE)
    results = {}
    for name, transform in TRANSFORMS.items():
        results[name] = transform(sim, inputs)
        with torch.no_grad(), in_mode(sim.quantizers.values(), qtk.Mode.BYPASS):
            change = relative(expected, call(sim.model, other))
        assert change <= tolerance, f"{name}: {change}\n{results[name]}"
        assert results[name].undone == (), str(results[name])
    left = [group for group in results["fold_batch_norms"].skipped if "statistics of the batch" in group.detail]
    nodes = [node for graph in graphs(sim.model).values() for node in graph.graph.nodes]
    assert sum(batch_norm_called(node) is not None for node in nodes) == len(left)
    return results


def doubled(inputs: object) -> object:
    return pytree.tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, inputs)


@pytest.mark.sample(3)
@pytest.mark.medium
@pytest.mark.parametrize("name", ZOO)
def test_the_zoo_in_float32(name: str) -> None:
    entry = ZOO[name]
    model, prepared = copied(name)
    with_outliers(model)  # whose tensors are those of the graph
    check(prepared, entry.inputs(), entry.inputs(3 if entry.dynamic else 2), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_the_zoo_in_float64(name: str) -> None:
    entry = ZOO[name]
    model = with_outliers(entry.model()).double()
    try:
        with torch.no_grad():
            call(model, doubled(entry.inputs()))
    except RuntimeError as error:
        pytest.skip(f"it does not run in float64: {error}")
    check(model, doubled(entry.inputs()), doubled(entry.inputs(3 if entry.dynamic else 2)), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", TIMM)
def test_models_of_timm(name: str, dtype: torch.dtype) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = with_outliers(timm.create_model(name, num_classes=10)).to(dtype)
    size = model.default_cfg["input_size"][1] if any(part in name for part in FIXED_SIZE) else 64
    inputs, other = (torch.randn(2, 3, size, size, dtype=dtype) for _ in range(2))
    results = check(model, inputs, other, 1e-4 if dtype is torch.float32 else 1e-10)
    assert any(result.applied for result in results.values())
