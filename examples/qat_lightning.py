"""Quantization-aware training with Lightning: the simulation's model is the module's model. Needs ``lightning``.

Run: ``python examples/qat_lightning.py --epochs 10``.
"""

import argparse

import lightning
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import qtk
from qtk.demo.digits import load_digits_split
from qtk.demo.models import build


class Quantized(lightning.LightningModule):
    """Trains a calibrated simulation."""

    def __init__(self, sim: qtk.QuantSim, steps: int) -> None:
        super().__init__()
        self.sim, self.steps = sim, steps
        self.model = sim.model  # its parameters and its state are the module's

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        images, labels = batch
        return cross_entropy(self.model(images), labels)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        images, labels = batch
        self.log("top1", (self.model(images).argmax(1) == labels).double().mean(), prog_bar=True)

    def configure_optimizers(self) -> dict[str, object]:
        ranges = {"params": self.sim.range_parameters(), "weight_decay": 0.0}
        weights = {"params": self.sim.weight_parameters(), "weight_decay": 0.01}
        optimizer = torch.optim.AdamW([weights, ranges], lr=2e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=self.steps, pct_start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs
    lightning.seed_everything(0)
    digits = load_digits_split()
    training = DataLoader(TensorDataset(digits.train_images, digits.train_labels), batch_size=32, shuffle=True)
    testing = DataLoader(TensorDataset(digits.test_images, digits.test_labels), batch_size=len(digits.test_labels))

    sim = qtk.QuantSim(build("digits_vit"), digits.train_images[:8], weight_bits=4, activation_bits=4)
    sim.compute_encodings(digits.train_images[:512].split(64))
    sim.learn_ranges()  # before configure_optimizers: the ranges are parameters from here on

    module = Quantized(sim, epochs * len(training))
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False
    )
    (calibrated,) = trainer.validate(module, testing, verbose=False)
    trainer.fit(module, training)
    (trained,) = trainer.validate(module, testing, verbose=False)
    print(f"W4A4, calibrated: {calibrated['top1']:.2%}")
    print(f"W4A4, trained: {trained['top1']:.2%}")


if __name__ == "__main__":
    main()
