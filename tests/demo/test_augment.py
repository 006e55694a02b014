from __future__ import annotations

import pytest
import torch

from qtk.demo import augment
from qtk.demo.augment import augmented


def test_same_generator_state_gives_same_images() -> None:
    images = torch.rand(5, 1, 8, 8)
    first = augmented(images, torch.Generator().manual_seed(3))
    assert torch.equal(first, augmented(images, torch.Generator().manual_seed(3)))
    assert not torch.equal(first, augmented(images, torch.Generator().manual_seed(4)))


def test_every_image_gets_its_own_motion_and_stays_in_range() -> None:
    moved = augmented(torch.rand(1, 1, 8, 8).expand(6, 1, 8, 8), torch.Generator().manual_seed(0))
    assert moved.shape == (6, 1, 8, 8)
    assert len({tuple(image.flatten().tolist()) for image in moved}) == 6
    assert moved.min() >= 0
    assert moved.max() <= 1


def test_without_motion_the_images_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_SHIFT", "MAX_TURN", "MAX_STRETCH", "MAX_SHEAR"):
        monkeypatch.setattr(augment, name, 0.0)
    images = torch.rand(4, 1, 8, 8)
    torch.testing.assert_close(augmented(images, torch.Generator().manual_seed(0)), images)


def test_a_shift_is_at_most_one_pixel(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_TURN", "MAX_STRETCH", "MAX_SHEAR"):
        monkeypatch.setattr(augment, name, 0.0)
    images = torch.zeros(64, 1, 8, 8)
    images[:, :, 4, 4] = 1
    moved = augmented(images, torch.Generator().manual_seed(0))
    away = moved.clone()
    away[:, :, 3:6, 3:6] = 0
    assert away.abs().max() < 1e-5
    assert (moved[:, 0, 4, 4] < 0.9).any()
