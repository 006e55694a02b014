"""Augmentation of digit images by small random affine transforms."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample

MAX_SHIFT = 0.25  # of half the image: one pixel of eight
MAX_TURN = math.radians(12)
MAX_STRETCH = 0.1
MAX_SHEAR = 0.15


def augmented(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shifts, rotates, stretches and shears each image at random, with numbers from ``generator``.

    Shape: images [N, 1, H, W]; the result likewise.
    """
    turn, shear, stretch_x, stretch_y, shift_x, shift_y = 2 * torch.rand(6, len(images), generator=generator) - 1
    turn = turn * MAX_TURN
    stretch_x, stretch_y = 1 + stretch_x * MAX_STRETCH, 1 + stretch_y * MAX_STRETCH
    rows = [
        torch.stack([stretch_x * turn.cos(), shear * MAX_SHEAR - turn.sin(), shift_x * MAX_SHIFT], dim=1),
        torch.stack([turn.sin(), stretch_y * turn.cos(), shift_y * MAX_SHIFT], dim=1),
    ]
    grid = affine_grid(torch.stack(rows, dim=1), list(images.shape), align_corners=False)
    return grid_sample(images, grid, align_corners=False)
