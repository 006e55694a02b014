"""Quantization-aware training with the Trainer of Hugging Face's transformers. Needs ``transformers[torch]``.

Run: ``python examples/qat_trainer.py --epochs 10``.
"""

import argparse
import tempfile

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import qtk
from qtk.demo.digits import load_digits_split
from qtk.demo.models import build


class WithLoss(nn.Module):
    """What the Trainer calls: scores, and their loss where there are labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        scores = self.model(images)
        return {"logits": scores} if labels is None else {"loss": cross_entropy(scores, labels), "logits": scores}


class Digits(Dataset[dict[str, Tensor]]):
    """Images with their labels."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"images": self.images[index], "labels": self.labels[index]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    epochs = parser.parse_args().epochs
    torch.manual_seed(0)
    digits = load_digits_split()

    sim = qtk.QuantSim(build("digits_vit"), digits.train_images[:8], weight_bits=4, activation_bits=4)
    sim.compute_encodings(digits.train_images[:512].split(64))
    sim.learn_ranges()
    weights = {"params": sim.weight_parameters(), "weight_decay": 0.01}
    ranges = {"params": sim.range_parameters(), "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([weights, ranges], lr=2e-3)
    steps = epochs * -(-len(digits.train_images) // 32)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps, pct_start=0.1)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=WithLoss(sim.model),
            args=TrainingArguments(
                folder, num_train_epochs=epochs, per_device_train_batch_size=32, per_device_eval_batch_size=540,
                use_cpu=True, report_to=[], save_strategy="no", seed=0,
            ),
            train_dataset=Digits(digits.train_images, digits.train_labels),
            eval_dataset=Digits(digits.test_images, digits.test_labels),
            compute_metrics=lambda made: {"top1": float((made.predictions.argmax(1) == made.label_ids).mean())},
            optimizers=(optimizer, schedule),
        )
        calibrated = trainer.evaluate()["eval_top1"]
        trainer.train()
        trained = trainer.evaluate()["eval_top1"]
    print(f"W4A4, calibrated: {calibrated:.2%}")
    print(f"W4A4, trained: {trained:.2%}")


if __name__ == "__main__":
    main()
