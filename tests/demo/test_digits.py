from __future__ import annotations

import sys

import pytest
import torch

from qtk.demo.digits import calibration_batches, evaluation_batches, load_digits_split
from qtk.errors import ConfigError

pytest.importorskip("sklearn")


def test_split_is_the_fixed_one() -> None:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    split = load_digits_split()
    parts = train_test_split(*load_digits(return_X_y=True), test_size=0.3, random_state=0)
    train_x, test_x, train_y, test_y = parts
    torch.testing.assert_close(split.train_images.flatten(1) * 16, torch.tensor(train_x, dtype=torch.float32))
    torch.testing.assert_close(split.test_images.flatten(1) * 16, torch.tensor(test_x, dtype=torch.float32))
    assert split.train_labels.tolist() == train_y.tolist()
    assert split.test_labels.tolist() == test_y.tolist()


def test_shapes_and_range() -> None:
    split = load_digits_split()
    assert split.train_images.shape == (1257, 1, 8, 8)
    assert split.test_images.shape == (540, 1, 8, 8)
    assert split.test_images.dtype == torch.float32
    assert (split.test_images.min(), split.test_images.max()) == (0, 1)


def test_batches_cover_the_split_in_order() -> None:
    split = load_digits_split()
    images, labels = zip(*evaluation_batches(), strict=True)
    assert torch.equal(torch.cat(images), split.test_images)
    assert torch.equal(torch.cat(labels), split.test_labels)
    images, labels = zip(*calibration_batches(batch_size=10, num_batches=3), strict=True)
    assert torch.equal(torch.cat(images), split.train_images[:30])
    assert torch.equal(torch.cat(labels), split.train_labels[:30])


def test_without_scikit_learn_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigError, match=r'pip install "qtk\[demo\]"'):
        load_digits_split()
