from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qtk.demo import models
from qtk.demo.digits import load_digits_split
from qtk.demo.models import DEMO_MODELS, build
from qtk.errors import ConfigError


@pytest.mark.parametrize(("name", "floor"), [("digits_cnn", 0.98), ("digits_vit", 0.95)])
def test_accuracy(name: str, floor: float) -> None:
    pytest.importorskip("sklearn")
    split = load_digits_split()
    with torch.no_grad():
        scores = build(name)(split.test_images)
    assert scores.shape == (540, 10)
    assert float((scores.argmax(1) == split.test_labels).double().mean()) >= floor


@pytest.mark.parametrize("name", DEMO_MODELS)
def test_weights_are_small_and_readable_by_all(name: str) -> None:
    path = Path(models.__file__).parent / "weights" / f"{name}.safetensors"
    assert path.stat().st_size < 300_000
    assert path.stat().st_mode & 0o444 == 0o444


@pytest.mark.parametrize("name", DEMO_MODELS)
def test_build_is_fresh_and_in_eval_mode(name: str) -> None:
    first, second = build(name), build(name)
    assert not any(module.training for module in first.modules())
    with torch.no_grad():
        next(first.parameters()).zero_()
    assert next(second.parameters()).abs().sum() > 0


def test_factories_build_the_models_of_their_name() -> None:
    for name, factory in {"digits_cnn": models.digits_cnn, "digits_vit": models.digits_vit}.items():
        ours, reference = factory().state_dict(), build(name).state_dict()
        assert ours.keys() == reference.keys()
        assert all(torch.equal(ours[key], reference[key]) for key in ours)


def test_unknown_name_lists_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'digits_cnn'"):
        build("digit_cnn")
