"""Top-1 of the digits models after quantization-aware training, from the calibrated start, with the float teacher.

    python benchmarks/models/qat_digits.py [--epochs 10] [--seeds 3] [--models digits_vit ...] [--bits 4 3]

Trained: weights, and ranges by ``sim.learn_ranges()`` (or fixed ranges, with --fixed), on augmented training images;
loss: ``qtk.distillation_loss`` at temperature 2. The ONNX column is top-1 of the exported file in ONNX Runtime.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import qtk
from qtk.demo.augment import augmented
from qtk.demo.digits import load_digits_split
from qtk.demo.models import build
from qtk.demo.train import top1
from qtk.export.onnx.session import create_session

LEARNING_RATES = {"digits_cnn": 1e-3, "digits_vit": 2e-3, "digits_lstm": 1e-2, "digits_gru": 1e-2}
RANGE_LEARNING_RATE = 1e-2
BATCH_SIZE = 32
DIGITS = load_digits_split()


def trained(name: str, bits: int, *, epochs: int, seed: int, learned: bool) -> tuple[qtk.QuantSim, float]:
    """A simulation after training, and its top-1 before."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    images = DIGITS.train_images
    sim = qtk.QuantSim(build(name), images[:8], weight_bits=bits, activation_bits=bits)
    sim.compute_encodings(images[:512].split(64), progress=False)
    calibrated = score(sim.model)
    groups = [{"params": sim.weight_parameters(), "lr": LEARNING_RATES[name]}]
    if learned:
        sim.learn_ranges()
        groups.append({"params": sim.range_parameters(), "lr": RANGE_LEARNING_RATE})
    teacher, rows_used = build(name), len(images) // BATCH_SIZE * BATCH_SIZE
    optimizer = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, [group["lr"] for group in optimizer.param_groups], pct_start=0.1, cycle_momentum=False,
        total_steps=epochs * (rows_used // BATCH_SIZE),
    )
    sim.model.train()
    for _ in range(epochs):
        for rows in torch.randperm(len(images), generator=generator)[:rows_used].split(BATCH_SIZE):
            batch = augmented(images[rows], generator)
            with torch.no_grad():
                of_teacher = teacher(batch)
            optimizer.zero_grad()
            torch.autograd.backward(qtk.distillation_loss(sim.model(batch), of_teacher, temperature=2.0))
            optimizer.step()
            schedule.step()
    return sim, calibrated


def score(model: nn.Module) -> float:
    return 100 * top1(model.eval(), DIGITS.test_images, DIGITS.test_labels)


def score_of_file(sim: qtk.QuantSim) -> float:
    with tempfile.TemporaryDirectory() as folder:
        sim.export(Path(folder) / "out", formats=("onnx",))
        session, _ = create_session(Path(folder) / "out" / "model.onnx")
        (scores,) = session.run(None, {session.get_inputs()[0].name: DIGITS.test_images.numpy()})
    return 100 * float((Tensor(scores).argmax(1) == DIGITS.test_labels).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--models", nargs="*", default=list(LEARNING_RATES), choices=list(LEARNING_RATES))
    parser.add_argument("--bits", type=int, nargs="*", default=[4, 3])
    parser.add_argument("--fixed", action="store_true", help="ranges stay as calibrated")
    arguments = parser.parse_args()
    print("| model | bits | float | calibrated | trained, by seed | in ONNX Runtime |\n|---|---|---|---|---|---|")
    for name in arguments.models:
        for bits in arguments.bits:
            runs = []
            for seed in range(arguments.seeds):
                sim, calibrated = trained(
                    name, bits, epochs=arguments.epochs, seed=seed, learned=not arguments.fixed
                )
                runs.append((score(sim.model), score_of_file(sim)))
            simulated, files = (", ".join(f"{each:.2f}" for each in column) for column in zip(*runs, strict=True))
            print(f"| {name} | W{bits}A{bits} | {score(build(name)):.2f} | {calibrated:.2f} | {simulated} | {files} |",
                  flush=True)


if __name__ == "__main__":
    main()
