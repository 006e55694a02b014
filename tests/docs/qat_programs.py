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


def with_stopped() -> dict[str, object]:
    names = with_loop()
    sim = qtk.QuantSim(names["model"], names["batches"][0], config="onnxruntime", weight_bits=4, activation_bits=4,
                       scheme="mse")
    sim.compute_encodings(names["batches"], progress=False)
    sim.learn_ranges()
    optimizer = torch.optim.AdamW([{"params": sim.weight_parameters(), "weight_decay": 0.01},
                                   {"params": sim.range_parameters(), "weight_decay": 0.0}], lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    for x in names["batches"]:
        sim.model(x).square().mean().backward()
        optimizer.step()
        schedule.step()
    return names | {"sim": sim, "stopped": sim, "optimizer": optimizer, "schedule": schedule}


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


def check_stopped(run: SimpleNamespace) -> None:
    assert run.sim is not run.stopped
    assert all(torch.equal(run.sim.model.state_dict()[name], value)
               for name, value in run.stopped.model.state_dict().items())
    assert len(run.optimizer.param_groups[1]["params"]) == len([*run.stopped.range_parameters()]) > 0
    assert run.schedule.last_epoch == 2
    assert run.optimizer.state[run.optimizer.param_groups[1]["params"][0]]["step"] == 2


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
    (with_loop, check_loop), (with_labels, check_labels), (with_stopped, check_stopped), (with_blocks, check_features),
    (with_batch_norm, check_live)]
"""One pair for each block."""
