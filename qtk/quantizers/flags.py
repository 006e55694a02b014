"""The flags of a quantizer in its ``state_dict``: tensors, only where they differ from a new quantizer's flags."""

from __future__ import annotations

from typing import Any

import torch

from qtk.ops.gradient_scale import GradientScale

FLAGS = ("frozen", "rewrote_weight", "momentum", "gradient_scale")
"""Their keys."""


def flags_to_tensors(flags: dict[str, Any], prefix: str) -> dict[str, torch.Tensor]:
    """Returns what a checkpoint holds of ``flags``; flags at their defaults are left out.

    >>> flags_to_tensors({"frozen": True, "momentum": None, "gradient_scale": GradientScale.NONE}, "fc.")
    {'fc.frozen': tensor(True), 'fc.gradient_scale': tensor(1)}
    """
    how = flags["gradient_scale"]
    numbers = {**flags, "gradient_scale": None if how is None else list(GradientScale).index(how)}
    return {prefix + flag: torch.tensor(value, device="cpu") for flag, value in numbers.items() if value}


def pop_flags(stored: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Takes the flags out of a checkpoint, which may be an average of several.

    A checkpoint with a scale says of ``frozen`` and ``rewrote_weight`` that they are not set by leaving them out. That
    ranges are learned, or follow their weights, stays so with one that does not say it.

    >>> pop_flags({"scale": torch.ones(1), "gradient_scale": torch.tensor(0.9)}, "")
    {'frozen': False, 'rewrote_weight': False, 'gradient_scale': <GradientScale.NONE: 'none'>}
    """
    numbers = {flag: stored.pop(prefix + flag).item() for flag in FLAGS if prefix + flag in stored}
    flags: dict[str, Any] = {}
    for flag in ("frozen", "rewrote_weight"):
        if flag in numbers or prefix + "scale" in stored:
            flags[flag] = bool(numbers.get(flag, False))
    if "momentum" in numbers:
        flags["momentum"] = float(numbers["momentum"])
    if "gradient_scale" in numbers or prefix + "scale_factor" in stored:
        flags["gradient_scale"] = list(GradientScale)[round(numbers.get("gradient_scale", 0))]
    return flags
