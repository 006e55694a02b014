"""The programs around the blocks of the guide to training: the names that each takes, and what it must have done."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.functional import mse_loss

import qtk
from tests.test_optional_inputs import IDS, LABELS, MASK, Classifier


def with_loop() -> dict[str, object]:
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    return {"model": teacher, "teacher": teacher, "batches": [torch.randn(16, 8) for _ in range(2)], "epochs": 2}


def with_labels() -> dict[str, object]:
    inputs = {"input_ids": IDS, "attention_mask": MASK}
    return {"model": Classifier().eval(), "ids": IDS, "mask": MASK, "labels": LABELS,
            "batches_without_labels": [inputs], "batch_with_labels": inputs | {"labels": LABELS}}


def with_blocks() -> dict[str, object]:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    teacher, x = Net().eval(), torch.randn(4, 8)
    sim = qtk.QuantSim(teacher, x, weight_bits=4)
    sim.compute_encodings([x], progress=False)
    return {"sim": sim, "teacher": teacher, "batches": [x], "mse_loss": mse_loss}


def with_batch_norm() -> dict[str, object]:
    x = torch.randn(4, 3, 8, 8)
    return {"model": nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval(), "x": x, "batches": [x]}


def check_loop(run: SimpleNamespace) -> None:
    assert Path("trained", "model.onnx").exists()
    groups = run.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.01, 0.0]
    trained = dict(run.sim.model.named_parameters())
    assert all(any(p is each for each in trained.values()) for group in groups for p in group["params"])
    assert not torch.equal(trained["0.weight"], run.teacher[0].weight)


def check_labels(run: SimpleNamespace) -> None:
    assert run.sim.model.get_parameter("head.weight").grad.any()


def check_features(run: SimpleNamespace) -> None:
    assert run.features == run.teacher_features == []
    assert {module.p for module in run.student.modules() if isinstance(module, nn.Dropout)} == {0.0}
    run.loss.backward()
    assert run.sim.model.get_parameter("blocks.0.0.weight").grad.any()


def check_live(run: SimpleNamespace) -> None:
    assert Path("exported", "model.onnx").exists()
    assert isinstance(run.sim.model.get_submodule("1"), nn.BatchNorm2d)


PROGRAMS = [
    (with_loop, check_loop), (with_labels, check_labels), (with_blocks, check_features), (with_batch_norm, check_live)]
"""One pair for each block."""
