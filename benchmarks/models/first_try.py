"""``qtk.quantize`` at the first try, from a plain loader: sentences, lines of text and images of different sizes.

    python benchmarks/models/first_try.py [--minilm FOLDER] [--only crnn] [--time-limit 120]

``minilm``: a sentence encoder (BERT, 6 blocks) of the folder, with ``transformers``; its loader gives dicts of token
ids and mask, padded to the longest sentence of each batch: paragraphs of ``docs/``. ``crnn``: a convolutional net with
a bidirectional LSTM and CTC, trained here on lines of three to six handwritten digits, whose loader gives (images,
labels) of different widths; its metric is the share of the lines read right. ``detector``: boxes from a softmax over
distances and scores, on images of different sizes, weights random. Drop without a metric: the error of the outputs
on held-out batches, 0.01 for 20 dB. Target ``onnxruntime``; nothing is passed to ``qtk.quantize`` but model, loader and
metric.
"""

from __future__ import annotations

import argparse
import random
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qtk
from qtk.demo.digits import load_digits_split
from qtk.report.table import Column, Table

Made = tuple[nn.Module, list[Any], dict[str, Any]]
"""A model, its loader, and what else ``qtk.quantize`` is given."""


def minilm(arguments: argparse.Namespace) -> Made:
    from transformers import AutoModel, AutoTokenizer  # needed for this one alone

    texts = [line for page in sorted(Path("docs").glob("*.md")) for line in page.read_text().split("\n\n")
             if len(line) > 40 and not line.startswith(("```", "|", "#"))]
    tokenizer = AutoTokenizer.from_pretrained(arguments.minilm)
    random.Random(0).shuffle(texts)
    batches = [dict(tokenizer(texts[at:at + 8], padding=True, truncation=True, max_length=64, return_tensors="pt"))
               for at in range(0, 8 * arguments.batches, 8)]
    for batch in batches:
        batch.pop("token_type_ids", None)
    return AutoModel.from_pretrained(arguments.minilm).eval(), batches, {}


class Crnn(nn.Module):
    """Reads a line of text: convolutions, a recurrent layer along the line, scores of each character and of none."""

    def __init__(self, classes: int = 10, width: int = 48) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.lstm = nn.LSTM(4 * width, width, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * width, classes + 1)

    def forward(self, images: Tensor) -> Tensor:
        found = self.body(images)
        return self.head(self.lstm(found.flatten(1, 2).transpose(1, 2))[0]).log_softmax(-1)


def lines(images: Tensor, labels: Tensor, seed: int, count: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of lines of digits side by side, all lines of a batch as long."""
    draw = torch.Generator().manual_seed(seed)
    for index in range(count):
        chosen = torch.randint(len(images), (size, 3 + index % 4), generator=draw)
        yield images[chosen].movedim(1, -2).flatten(-2), labels[chosen]


def read_right(scores: Tensor, labels: Tensor) -> Tensor:
    """Whether each line is read right: the best character of each place, repeated ones and blanks left out."""
    right = []
    for best, wanted in zip(scores.argmax(-1).tolist(), labels.tolist(), strict=True):
        kept = [now for before, now in zip([0, *best], best, strict=False) if now not in (before, 0)]
        right.append(kept == [each + 1 for each in wanted])
    return torch.tensor(right)


def crnn(arguments: argparse.Namespace) -> Made:
    split = load_digits_split()
    model = Crnn()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for images, labels in lines(split.train_images, split.train_labels, 1, arguments.steps, 32):
        scores = model(images).transpose(0, 1)
        lengths = torch.full((len(images),), len(scores)), torch.full((len(images),), labels.shape[1])
        loss = nn.functional.ctc_loss(scores, labels + 1, *lengths)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    unseen = list(lines(split.test_images, split.test_labels, 2, 12, 32))

    def lines_right(net: nn.Module) -> float:
        with torch.no_grad():
            return float(torch.cat([read_right(net(images), labels) for images, labels in unseen]).float().mean())

    batches = list(lines(split.train_images, split.train_labels, 3, arguments.batches, 16))
    return model.eval(), batches, {"evaluate": lines_right}


class Detector(nn.Module):
    """A net like YOLO's: the sides of boxes are means of distances by a softmax (DFL), scores are sigmoids."""

    def __init__(self, classes: int = 3, bins: int = 8, stride: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.SiLU(),
                                  nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.SiLU())
        self.sides, self.scores = nn.Conv2d(32, 4 * bins, 1), nn.Conv2d(32, classes, 1)
        self.stride = stride
        self.register_buffer("distances", torch.arange(bins).float())

    def forward(self, images: Tensor) -> Tensor:
        x = self.body(images)
        samples, _, height, width = x.shape
        bins = self.sides(x).reshape(samples, 4, -1, height * width).softmax(2)
        sides = (bins * self.get_buffer("distances")[:, None]).sum(2)
        rows = torch.arange(height, device=x.device).repeat_interleave(width)
        columns = torch.arange(width, device=x.device).repeat(height)
        centres = torch.stack([columns, rows]) + 0.5
        boxes = torch.cat([centres - sides[:, :2], centres + sides[:, 2:]], 1) * self.stride
        return torch.cat([boxes, self.scores(x).flatten(2).sigmoid()], 1)


def detector(arguments: argparse.Namespace) -> Made:
    sizes = [(32, 32), (32, 48), (48, 64), (64, 64)]
    batches = [torch.rand(4, 3, *sizes[index % 4]) for index in range(arguments.batches)]
    return Detector().eval(), batches, {}


NETWORKS: dict[str, Callable[[argparse.Namespace], Made]] = {"minilm": minilm, "crnn": crnn, "detector": detector}


def row(name: str, arguments: argparse.Namespace) -> tuple[str, ...]:
    model, loader, settings = NETWORKS[name](arguments)
    floats = sum(value.numel() * value.element_size() for value in model.parameters())
    begun = time.monotonic()
    try:
        _, account = qtk.quantize(model, loader, time_limit=arguments.time_limit, progress=False, **settings)
    except Exception as error:  # whatever it is: the first try failed
        return name, f"no: {type(error).__name__}: {error}"[:100], "", "", "", "", f"{time.monotonic() - begun:.0f}"
    best = account.best
    assert best is not None
    print(account, flush=True)
    return (name, "yes" if account.reached else "yes, the drop not reached", f"{best.drop:.4f}", f"{best.sqnr_db:.1f}",
            f"{(best.size_bytes or 0) / 1e6:.2f} of {floats / 1e6:.2f}", f"{best.run_time or 0:.2f}",
            f"{time.monotonic() - begun:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minilm", help="a folder with model.safetensors and a tokenizer; left out: not run")
    parser.add_argument("--only", nargs="+", default=list(NETWORKS))
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--steps", type=int, default=400, help="of training the crnn")
    parser.add_argument("--time-limit", type=float, default=120.0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    rows = [row(name, arguments) for name in arguments.only if name != "minilm" or arguments.minilm]
    columns = (Column("network"), Column("first try"), Column("drop", number=True), Column("SQNR, dB", number=True),
               Column("size, MB", number=True), Column("about × float ms", number=True),
               Column("time, s", number=True))
    print(Table("qtk.quantize from a plain loader, target onnxruntime", columns, tuple(rows)).text())


if __name__ == "__main__":
    main()
