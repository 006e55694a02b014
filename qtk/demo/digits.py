"""The 1,797 handwritten digits of scikit-learn, with a fixed split."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from qtk.errors import ConfigError

CLASSES = 10
SIDE = 8
"""Pixels of a row, and rows of an image."""
BATCH_SIZE = 64


class DigitsSplit(NamedTuple):
    """1,257 images to train and calibrate on, 540 to test on.

    Shape: images [N, 1, 8, 8] float32 from 0 to 1; labels [N] int64.
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits_split() -> DigitsSplit:
    """The digits, split with ``test_size=0.3, random_state=0``: the same 540 test images everywhere.

    Raises: ConfigError if scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise ConfigError(
            'the digits come with scikit-learn, which is not installed; run: pip install "qtk[demo]"'
        ) from error
    data = load_digits()
    splits = train_test_split(data.images, data.target, test_size=0.3, random_state=0)
    train_images, test_images, train_labels, test_labels = (torch.from_numpy(array) for array in splits)
    return DigitsSplit(_pixels(train_images), train_labels.long(), _pixels(test_images), test_labels.long())


def calibration_batches(batch_size: int = BATCH_SIZE, num_batches: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    """The first training images with their labels, in the order of the split."""
    split = load_digits_split()
    yield from islice(_batches(split.train_images, split.train_labels, batch_size), num_batches)


def evaluation_batches(batch_size: int = BATCH_SIZE) -> Iterator[tuple[Tensor, Tensor]]:
    """The 540 test images with their labels."""
    split = load_digits_split()
    yield from _batches(split.test_images, split.test_labels, batch_size)


def _batches(images: Tensor, labels: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(torch.split(images, batch_size), torch.split(labels, batch_size), strict=True)


def _pixels(images: Tensor) -> Tensor:
    """Converts grey values 0…16, [N, 8, 8], to float32 0…1, [N, 1, 8, 8]."""
    return images.to(torch.float32).unsqueeze(1) / 16
