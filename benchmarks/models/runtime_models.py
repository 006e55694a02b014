"""The models of ``bench_runtimes.py``, each with inputs that calibrate it and others that it is compared on.

The digits nets have their weights and data, MiniLM its weights and the documentation's words; others have random
weights and made inputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from deployed_models import build as deployed
from torch import Tensor, nn

from qtk.demo.digits import load_digits_split
from qtk.demo.models import DEMO_MODELS
from qtk.demo.models import build as demo

IMAGES = {"resnet18": 224, "mobilenetv3_small_050": 224, "vit_tiny_patch16_224": 224}
MINILM = "minilm"
WIDTH, LENGTH, ROWS = 128, 32, 64
"""Width of a CRNN's image, words of a sentence, rows that calibrate small models."""


@dataclass(frozen=True)
class Case:
    """A model with the inputs that calibrate it and others that it is compared on, a row each."""

    model: nn.Module
    calibration: tuple[Tensor, ...]
    evaluation: tuple[Tensor, ...]


class Crnn(nn.Module):
    """Three convolutions with pooling, a bidirectional LSTM over the width, scores of 40 characters."""

    def __init__(self) -> None:
        super().__init__()
        widths, layers = (1, 32, 64, 96), []
        for index in range(3):
            layers += [nn.Conv2d(widths[index], widths[index + 1], 3, padding=1), nn.BatchNorm2d(widths[index + 1]),
                       nn.ReLU(), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        self.lstm, self.scores = nn.LSTM(96, 64, bidirectional=True, batch_first=True), nn.Linear(128, 40)

    def forward(self, images: Tensor) -> Tensor:
        columns = self.features(images).mean(2).transpose(1, 2)
        steps, _ = self.lstm(columns)
        return self.scores(steps)


class GruStream(nn.Module):
    """A step of a GRU: frame and state in, output and state out."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.cell, self.decode = nn.Linear(40, 64), nn.GRUCell(64, 96), nn.Linear(96, 40)

    def forward(self, frame: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.cell(torch.relu(self.encode(frame)), state)
        return torch.sigmoid(self.decode(state)), state


class MiniLM(nn.Module):
    """The sentence embedding: mean of the last states over the tokens."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        from transformers import AutoModel  # an extra

        self.bert = AutoModel.from_pretrained(folder, attn_implementation="sdpa")

    def forward(self, ids: Tensor) -> Tensor:
        return self.bert(input_ids=ids).last_hidden_state.mean(1)


def digits(name: str) -> Case:
    split = load_digits_split()
    return Case(demo(name), (split.train_images[:256],), (split.test_images,))


def images(name: str) -> Case:
    """Norms are away from the identity: timm begins the last norm of a residual branch with 0, which takes it away."""
    model = deployed(name)
    smooth = nn.functional.interpolate(torch.randn(40, 3, 28, 28), size=IMAGES[name], mode="bilinear")
    return Case(model, (smooth[:8],), (smooth[8:],))


def crnn() -> Case:
    torch.manual_seed(0)
    x = torch.rand(ROWS + 32, 1, 32, WIDTH)
    return Case(Crnn().eval(), (x[:ROWS],), (x[ROWS:],))


def gru_stream() -> Case:
    """States as the float model reaches them after some steps."""
    torch.manual_seed(0)
    model, frames = GruStream().eval(), torch.randn(8, 192, 40)
    state = torch.zeros(192, 96)
    with torch.no_grad():
        for frame in frames:
            _, state = model(frame, state)
    return Case(model, (frames[0, :ROWS], state[:ROWS]), (frames[1, ROWS:], state[ROWS:]))


def minilm(folder: Path) -> Case:
    from transformers import AutoTokenizer  # an extra

    text = " ".join(path.read_text(encoding="utf-8") for path in sorted(Path("docs").glob("*.md")))
    words = re.findall(r"[A-Za-z]{2,}", text)
    sentences = [" ".join(words[start:start + LENGTH]) for start in range(0, (ROWS + 32) * LENGTH, LENGTH)]
    ids = AutoTokenizer.from_pretrained(folder)(sentences, max_length=LENGTH, truncation=True, return_tensors="pt")
    rows = ids["input_ids"]
    return Case(MiniLM(folder).eval(), (rows[:ROWS],), (rows[ROWS:],))


CASES: dict[str, Callable[[], Case]] = {
    **{name: partial(digits, name) for name in DEMO_MODELS}, **{name: partial(images, name) for name in IMAGES},
    "crnn": crnn, "gru_stream": gru_stream,
}
MODELS = (*CASES, MINILM)


def build(name: str, folder: Path | None) -> Case:
    """Args: folder: the files of all-MiniLM-L6-v2. Raises: ValueError if MiniLM has none."""
    if name != MINILM:
        return CASES[name]()
    if folder is None:
        raise ValueError("no --minilm FOLDER with the files of all-MiniLM-L6-v2")
    return minilm(folder)
