"""Top-1 of the digits models after quantization-aware training, from the calibrated start, with the float teacher.

    python benchmarks/models/qat_digits.py [--epochs 10] [--seeds 0 1 2] [--models digits_vit ...] [--bits 4 3]

Trained: weights, and ranges by ``sim.learn_ranges()`` (or fixed ranges, with --fixed), as ``RECIPES`` says;
loss: ``qtk.distillation_loss``, and for the transformer the distance of its blocks' outputs from the teacher's. The
ONNX column is top-1 of the exported file in ONNX Runtime. With --validate a fifth of the training images is held out:
a float model is trained without it and quantized, and scored on it; the test images are not looked at.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import qtk
from qtk.demo.augment import augmented
from qtk.demo.digits import load_digits_split
from qtk.demo.models import build
from qtk.demo.train import top1, train
from qtk.runtimes.session import create_session

DIGITS = load_digits_split()


@dataclass(frozen=True)
class Recipe:
    """How a model is calibrated and trained. ``features``: blocks whose outputs follow the teacher's."""

    learning_rate: float
    range_learning_rate: float = 1e-2
    scheme: str = "min_max"
    batch_size: int = 32
    temperature: float = 2.0
    augment: bool = True
    dropout: bool = True
    features: tuple[str, ...] = ()


RECIPES = {
    "digits_cnn": Recipe(1e-3),
    "digits_vit": Recipe(
        5e-4, 5e-3, scheme="tf_enhanced", temperature=1.0, augment=False, dropout=False,
        features=("blocks.0", "blocks.1", "blocks.2"),
    ),
    "digits_lstm": Recipe(1e-2),
    "digits_gru": Recipe(1e-2),
}


class Data(NamedTuple):
    """A float model, what its quantized version is trained on, and what it is scored on."""

    build: Callable[[], nn.Module]
    images: Tensor
    scored_images: Tensor
    scored_labels: Tensor


def data(name: str, *, validate: bool) -> Data:
    if not validate:
        return Data(partial(build, name), DIGITS.train_images, DIGITS.test_images, DIGITS.test_labels)
    held, images, labels = len(DIGITS.train_images) // 5, DIGITS.train_images, DIGITS.train_labels
    teacher = train(name, images[held:], labels[held:], progress=False)
    return Data(partial(deepcopy, teacher), images[held:], images[:held], labels[:held])


def outputs_of(model: nn.Module, names: tuple[str, ...]) -> list[Tensor]:
    """A list to which every forward pass appends what the modules return."""
    outputs: list[Tensor] = []
    for name in names:
        model.get_submodule(name).register_forward_hook(lambda module, args, output: outputs.append(output))
    return outputs


def distance(features: list[Tensor], teacher_features: list[Tensor]) -> Tensor:
    """The sum of squared errors, each relative to the variance of the teacher's; empties both lists."""
    total = torch.stack([mse_loss(mine, its) / its.var() for mine, its in zip(features, teacher_features, strict=True)])
    features.clear()
    teacher_features.clear()
    return total.sum()


def trained(name: str, bits: int, of: Data, *, epochs: int, seed: int, learned: bool) -> tuple[qtk.QuantSim, float]:
    """A simulation after training, and its top-1 before."""
    recipe, images = RECIPES[name], of.images
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    sim = qtk.QuantSim(
        of.build(), images[:8], scheme=recipe.scheme, weight_bits=bits, activation_bits=bits
    )
    sim.compute_encodings(images[:512].split(64), progress=False)
    calibrated = score(sim.model, of)
    groups = [{"params": sim.weight_parameters(), "lr": recipe.learning_rate}]
    if learned:
        sim.learn_ranges()
        groups.append({"params": sim.range_parameters(), "lr": recipe.range_learning_rate})
    teacher, rows_used = of.build(), len(images) // recipe.batch_size * recipe.batch_size
    optimizer = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [group["lr"] for group in optimizer.param_groups], pct_start=0.1, cycle_momentum=False,
        total_steps=epochs * (rows_used // recipe.batch_size),
    )
    model = qtk.block_view(sim, recipe.features) if recipe.features else sim.model
    features, teacher_features = outputs_of(model, recipe.features), outputs_of(teacher, recipe.features)
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout) and not recipe.dropout:
            module.p = 0.0
    for _ in range(epochs):
        for rows in torch.randperm(len(images), generator=generator)[:rows_used].split(recipe.batch_size):
            batch = augmented(images[rows], generator) if recipe.augment else images[rows]
            with torch.no_grad():
                of_teacher = teacher(batch)
            optimizer.zero_grad()
            loss = qtk.distillation_loss(model(batch), of_teacher, temperature=recipe.temperature)
            if recipe.features:
                loss = loss + distance(features, teacher_features)
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
    return sim, calibrated


def score(model: nn.Module, of: Data) -> float:
    return 100 * top1(model.eval(), of.scored_images, of.scored_labels)


def score_of_file(sim: qtk.QuantSim, of: Data) -> float:
    with tempfile.TemporaryDirectory() as folder:
        sim.export(Path(folder) / "out", formats=("onnx",))
        session, _ = create_session(Path(folder) / "out" / "model.onnx")
        (scores,) = session.run(None, {session.get_inputs()[0].name: of.scored_images.numpy()})
    return 100 * float((Tensor(scores).argmax(1) == of.scored_labels).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--models", nargs="*", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--bits", type=int, nargs="*", default=[4, 3])
    parser.add_argument("--fixed", action="store_true", help="ranges stay as calibrated")
    parser.add_argument("--validate", action="store_true", help="score on held-out training images")
    arguments = parser.parse_args()
    print("| model | bits | float | calibrated | trained, by seed | in ONNX Runtime |\n|---|---|---|---|---|---|")
    for name in arguments.models:
        of = data(name, validate=arguments.validate)
        for bits in arguments.bits:
            runs = []
            for seed in arguments.seeds:
                sim, calibrated = trained(
                    name, bits, of, epochs=arguments.epochs, seed=seed, learned=not arguments.fixed
                )
                runs.append((score(sim.model, of), score_of_file(sim, of)))
            simulated, files = (", ".join(f"{each:.2f}" for each in column) for column in zip(*runs, strict=True))
            before = f"{score(of.build(), of):.2f} | {calibrated:.2f}"
            print(f"| {name} | W{bits}A{bits} | {before} | {simulated} | {files} |", flush=True)


if __name__ == "__main__":
    main()
