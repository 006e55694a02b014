from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from qtk.demo import train as trainer
from qtk.demo.models import DEMO_MODELS
from qtk.demo.train import top1, train

pytest.importorskip("sklearn")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "EPOCHS", dict.fromkeys(DEMO_MODELS, 1))


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("name", DEMO_MODELS)
def test_training_is_reproducible_and_ends_in_eval_mode(name: str) -> None:
    images, labels = torch.rand(128, 1, 8, 8), torch.arange(128) % 10
    first = train(name, images, labels, progress=False)
    second = train(name, images, labels, progress=False)
    assert not first.training
    for key, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[key]), key


def test_top1() -> None:
    scores = torch.eye(10)[[3, 1, 4, 1]]
    assert top1(torch.nn.Identity(), scores, torch.tensor([3, 1, 4, 5])) == 0.75


@pytest.mark.medium
@pytest.mark.usefixtures("short")
def test_validation_writes_nothing_and_looks_at_no_test_image(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    split = trainer.load_digits_split()
    spoiled = split._replace(test_images=None, test_labels=None)  # any use of them fails
    monkeypatch.setattr(trainer, "load_digits_split", lambda: spoiled)
    monkeypatch.setattr(sys, "argv", ["train", "digits_cnn", "--validate", "--output", str(tmp_path / "weights")])
    trainer.main()
    assert "held-out" in capsys.readouterr().out
    assert not (tmp_path / "weights").exists()


@pytest.mark.medium
@pytest.mark.usefixtures("short")
def test_written_weights_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    monkeypatch.setattr(sys, "argv", ["train", "digits_cnn", "--output", str(tmp_path)])
    trainer.main()
    DEMO_MODELS["digits_cnn"]().load_state_dict(load_file(tmp_path / "digits_cnn.safetensors"))
