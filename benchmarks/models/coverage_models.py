"""The models of the coverage benchmark: the smallest of every family, random weights, small inputs."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import timm
import torch
from torch import nn
from torchvision import models as vision

from tests.zoo.models import ZOO

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
SMALL = re.compile(
    r"atto|femto|pico|nano|tiny|xxs|small|mini|micro|_(xs|s|t)(\d|_|$)|b0|(10|14|18|19|26)($|_|t)|0(35|50)|mobile"
)
CANDIDATES = 8
SMALLER = (96, 112)
"""Smaller image sides to try for models without a fixed input size."""

VISION = ("classification", "segmentation", "detection", "video", "optical_flow")
MODULES = {"classification": vision, "segmentation": vision.segmentation, "detection": vision.detection,
           "video": vision.video, "optical_flow": vision.optical_flow}


def names(group: str) -> list[str]:
    """The models of a group: one of each family; all that are made by hand."""
    if group == "handmade":
        return list(ZOO)
    if group == "timm":
        chosen = (_smallest(timm.list_models(module=module), _timm) for module in timm.list_modules())
        return [name for name in chosen if name]
    families: dict[str, list[str]] = {}
    for name in vision.list_models(MODULES[group]):
        # of detectors each is a family: their heads differ more than their modules tell
        family = name if group == "detection" else vision.get_model_builder(name).__module__
        families.setdefault(family, []).append(name)
    return [_smallest(family, _vision) for family in families.values()]


def build(group: str, name: str) -> tuple[nn.Module, Callable[[int], Inputs]]:
    """A model in eval mode with fixed random weights, and its inputs by seed."""
    torch.manual_seed(0)
    if group == "handmade":
        entry = ZOO[name]
        return entry.model(), functools.partial(_of_entry, name)
    if group == "timm":
        model = _woken(_timm(name))
        size = model.pretrained_cfg.get("input_size", (3, 224, 224))
        smaller = () if model.pretrained_cfg.get("fixed_input_size", False) else SMALLER
        shapes = [(2, 3, side, side) for side in smaller]
        shape = next((shape for shape in shapes if _runs(model, shape)), (2, *size))
        return model, functools.partial(_images, shape)
    model = _woken(_vision(name))
    if group == "detection":
        return model, _pictures
    if group == "video":
        side = 112 if _runs(model, (1, 3, 16, 112, 112)) else 224
        return model, functools.partial(_images, (1, 3, 16, side, side))
    if group == "optical_flow":
        return model, _frames
    side = next(side for side in (64, 96, 224, 299) if _runs(model, (2, 3, side, side)))
    return model, functools.partial(_images, (2, 3, side, side))


def _woken(model: nn.Module) -> nn.Module:
    """Randomizes parameters that start as zeros, which would hide errors in the layers before them."""
    generator = _seeded(0)
    with torch.no_grad():
        for parameter in model.parameters():
            low, high = parameter.aminmax()
            if low == high and abs(low) < 0.01:
                parameter.uniform_(-0.1, 0.1, generator=generator)
    return model.eval()


def _timm(name: str) -> nn.Module:
    return timm.create_model(name, pretrained=False)


def _vision(name: str) -> nn.Module:
    try:
        return vision.get_model(name, weights=None, weights_backbone=None)
    except (TypeError, ValueError):
        return vision.get_model(name, weights=None)


def _smallest(family: list[str], make: Callable[[str], nn.Module]) -> str:
    """The model with the fewest parameters among those with a small-sounding name."""
    family = [name for name in family if not name.startswith("test_")] or family  # toys of timm's own tests
    candidates = sorted(family, key=lambda name: not SMALL.search(name))[:CANDIDATES]
    if len(candidates) <= 1:
        return candidates[0] if candidates else ""
    sizes = {}
    for name in candidates:
        try:
            with torch.device("meta"):
                sizes[name] = sum(parameter.numel() for parameter in make(name).parameters())
        except Exception:  # some cannot be built without memory
            continue
    return min(sizes, key=lambda name: sizes[name]) if sizes else candidates[0]




def _runs(model: nn.Module, shape: tuple[int, ...]) -> bool:
    try:
        with torch.no_grad():
            model(torch.zeros(shape))
    except Exception:
        return False
    return True


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _images(shape: tuple[int, ...], seed: int) -> Inputs:
    return (torch.randn(shape, generator=_seeded(seed)),), {}


def _pictures(seed: int) -> Inputs:
    generator = _seeded(seed)
    return ([torch.rand(3, 200, 240, generator=generator), torch.rand(3, 180, 200, generator=generator)],), {}


def _frames(seed: int) -> Inputs:
    generator = _seeded(seed)
    return (torch.rand(1, 3, 128, 128, generator=generator), torch.rand(1, 3, 128, 128, generator=generator)), {}


def _of_entry(name: str, seed: int) -> Inputs:
    torch.manual_seed(seed)
    inputs = ZOO[name].make_inputs(2)
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    return ((), dict(inputs)) if isinstance(inputs, dict) else (tuple(inputs), {})
