"""Real recurrent networks, with the weights of packages, and data made for them: speech in noise, and lines of text.

Each network stands here in plain PyTorch; the weights, a voice and fonts are found where packages have put them.
"""

from __future__ import annotations

import importlib.util
import io
import math
import random
import re
import shutil
import subprocess
import wave
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from torch import Tensor, nn

RATE, CHUNK, CONTEXT = 16_000, 512, 64
"""Samples a second, of one step, and of the step before that come along."""

HIDDEN, HEIGHT, WIDTH = 128, 64, 384
"""Of the detector's cell; of the image of a line."""


class MissingPackageError(Exception):
    """Something that a package would bring; the message says which."""


class Detector(nn.Module):
    """The voice detector of silero-vad: a spectrum, four convolutions, and an LSTM cell with its state as input."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Conv1d(1, 258, 256, 128, bias=False)
        sizes = ((129, 128, 1), (128, 64, 2), (64, 64, 2), (64, HIDDEN, 1))
        self.encoder = nn.ModuleList(nn.Conv1d(inputs, outputs, 3, stride, 1) for inputs, outputs, stride in sizes)
        self.cell, self.head = nn.LSTMCell(HIDDEN, HIDDEN), nn.Conv1d(HIDDEN, 1, 1)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Shape: x [N, CONTEXT + CHUNK], state [2, N, HIDDEN]. Returns: the probability of a voice [N], the state."""
        real, imaginary = self.spectrum(F.pad(x, (0, 64), mode="reflect").unsqueeze(1)).chunk(2, 1)
        y = (real**2 + imaginary**2).sqrt()
        for conv in self.encoder:
            y = conv(y).relu()
        h, c = self.cell(y.squeeze(-1), (state[0], state[1]))
        return self.head(h.unsqueeze(-1).relu()).sigmoid().flatten(), torch.stack([h, c])


class TwoWays(nn.Module):
    """A bidirectional LSTM and a linear layer."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.rnn = nn.LSTM(inputs, hidden, bidirectional=True, batch_first=True)
        self.linear = nn.Linear(2 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.rnn(x)[0])
        return y


class Reader(nn.Module):
    """EasyOCR's recognizer, second generation: seven convolutions, two bidirectional LSTMs, a score a character."""

    def __init__(self, classes: int, width: int = 256) -> None:
        super().__init__()
        self.FeatureExtraction, layers, inputs = nn.Module(), list[nn.Module](), 1
        # outputs of a convolution, whether a batch norm follows, and the pooling behind
        for outputs, has_norm, pool in ((width // 8, False, (2, 2)), (width // 4, False, (2, 2)),
                                        (width // 2, False, None), (width // 2, False, (2, 1)),
                                        (width, True, None), (width, True, (2, 1))):
            layers.append(nn.Conv2d(inputs, outputs, 3, 1, 1, bias=not has_norm))
            layers += [nn.BatchNorm2d(outputs)] if has_norm else []
            layers.append(nn.ReLU())
            layers += [] if pool is None else [nn.MaxPool2d(pool, pool)]
            inputs = outputs
        self.FeatureExtraction.ConvNet = nn.Sequential(*layers, nn.Conv2d(width, width, 2), nn.ReLU())
        self.SequenceModeling = nn.Sequential(TwoWays(width, width), TwoWays(width, width))
        self.Prediction = nn.Linear(width, classes)

    def forward(self, image: Tensor) -> Tensor:
        """Shape: image [N, 1, HEIGHT, W] in [-1, 1]. Returns: scores [N, T, classes]; class 0 is the blank of CTC."""
        features = self.FeatureExtraction.ConvNet(image).permute(0, 3, 1, 2).mean(3)  # type: ignore[operator]
        scores: Tensor = self.Prediction(self.SequenceModeling(features))
        return scores


class Residual(nn.Module):
    """A wide convolution, SiLU and a narrow convolution, added to their input where shapes allow."""

    def __init__(self, inputs: int, inner: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Conv2d(inputs, inner, 3, stride, 1), nn.Conv2d(inner, outputs, 1)
        self.is_added = inputs == outputs and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.narrow(F.silu(self.wide(x)))
        return x + y if self.is_added else y


class ManyCharacters(nn.Module):
    """ddddocr's reader: a convolutional net with residuals, a bidirectional LSTM, scores of 8,210 characters."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 24, 3, 2, 1)
        sizes = ((24, 24, 24, 1), (24, 24, 24, 1), (24, 96, 48, 2), *[(48, 192, 48, 1)] * 3, (48, 192, 64, 2),
                 *[(64, 256, 64, 1)] * 3)
        self.blocks = nn.Sequential(*(Residual(*each) for each in sizes))
        self.lstm, self.head = nn.LSTM(512, 512, bidirectional=True), nn.Linear(1024, 8210)

    def forward(self, image: Tensor) -> Tensor:
        """Shape: as of ``Reader``; the pixels that it reads are in [0, 1]."""
        y = self.blocks(F.silu(self.stem((image + 1) / 2))).permute(3, 0, 1, 2).flatten(2)
        scores: Tensor = self.head(self.lstm(y)[0]).transpose(0, 1)
        return scores


def package_file(package: str, name: str) -> Path:
    """The file of that name of an installed package. Raises: MissingPackageError."""
    found = importlib.util.find_spec(package)
    places = [] if found is None else map(Path, found.submodule_search_locations or ())
    for place in places:
        for file in place.rglob(name):
            return file
    raise MissingPackageError(f"{name} of the package {package} is not installed")


def detector() -> Detector:
    """With the weights of the package's ONNX file, which are in the order of the network's."""
    file = onnx.load(package_file("silero_vad", "silero_vad_16k_op15.onnx"))
    weights = [torch.from_numpy(onnx.numpy_helper.to_array(each).copy()) for each in file.graph.initializer]
    model = Detector()
    model.load_state_dict(dict(zip(model.state_dict(), weights, strict=True)))
    return model.eval()


def many_characters() -> ManyCharacters:
    """With the weights of the package's ONNX file, in the order of its nodes; an LSTM's gates are i, o, f, g there."""
    graph = onnx.load(package_file("ddddocr", "common.onnx")).graph
    held = {each.name: torch.from_numpy(onnx.numpy_helper.to_array(each).copy()) for each in graph.initializer}
    model, weights = ManyCharacters(), list[Tensor]()
    for node in graph.node:
        taken = [held[name] for name in node.input if name in held and node.op_type in ("Conv", "LSTM", "Gemm")]
        if node.op_type == "LSTM":
            i, o, f, g = (slice(at * 512, at * 512 + 512) for at in range(4))
            w_ih, w_hh, bias = (torch.cat([each[:, gate] for gate in (i, f, g, o)], 1) for each in (
                *taken[:2], taken[2].unflatten(1, (2, 2048)).transpose(1, 2)))
            taken = [each for way in (0, 1) for each in (w_ih[way], w_hh[way], bias[way, :, 0], bias[way, :, 1])]
        weights += taken
    model.load_state_dict(dict(zip(model.state_dict(), weights, strict=True)))
    return model.eval()


def reader() -> Reader:
    file = package_file("easyocr_en_models", "english_g2.pth")
    weights = torch.load(file, map_location="cpu", weights_only=True)
    weights = {name.removeprefix("module."): value for name, value in weights.items()}
    model = Reader(len(weights["Prediction.bias"]))
    model.load_state_dict(weights)
    return model.eval()


def words() -> list[str]:
    """The words of the documentation."""
    pages = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    return re.findall(r"[A-Za-z][a-z]{2,}", " ".join(page.read_text(encoding="utf-8") for page in pages))


def speech(text: str, voice: str, speed: int, pitch: int) -> Tensor:
    """A sentence spoken by espeak-ng, in [-1, 1] at ``RATE``. Raises: MissingPackageError."""
    program = shutil.which("espeak-ng")
    if program is None:
        raise MissingPackageError("espeak-ng is not installed (Debian: espeak-ng)")
    spoken = subprocess.run([program, "-v", voice, "-s", str(speed), "-p", str(pitch), "--stdout", text],
                            capture_output=True, check=True).stdout
    with wave.open(io.BytesIO(spoken)) as sound:
        rate, samples = sound.getframerate(), sound.readframes(10**8)
    x = torch.from_numpy(np.frombuffer(samples, np.int16).astype(np.float32)) / 32768
    length = len(x) * RATE // rate
    return torch.fft.irfft(torch.fft.rfft(x)[:length // 2 + 1], length) * (length / len(x))


def streams(voices: Sequence[str], count: int, steps: int, seed: int) -> Tensor:
    """Sentences and pauses in noise of all loudnesses, cut into steps: [steps, count, CONTEXT + CHUNK]."""
    draw, generator, vocabulary = random.Random(seed), torch.Generator().manual_seed(seed), words()
    length, every = steps * CHUNK, []
    for index in range(count):
        pieces = [torch.zeros(CONTEXT)]
        while sum(map(len, pieces)) < length + CONTEXT:
            said = speech(" ".join(draw.sample(vocabulary, draw.randint(2, 7))), voices[index % len(voices)],
                          draw.randint(120, 200), draw.randint(20, 80))
            pieces += [torch.zeros(int(draw.uniform(0.2, 2.0) * RATE)), said * 10 ** draw.uniform(-1.0, 0.0)]
        noise = torch.randn(length + CONTEXT, generator=generator)
        if index % 2:  # brown rather than white
            noise = torch.fft.irfft(torch.fft.rfft(noise) / torch.arange(1, len(noise) // 2 + 2).sqrt(), len(noise))
            noise /= noise.std()
        every.append(torch.cat(pieces)[:length + CONTEXT] + noise * 10 ** draw.uniform(-4.0, -1.3))
    return torch.stack(every).unfold(1, CONTEXT + CHUNK, CHUNK).transpose(0, 1).contiguous()


def lines(fonts: Sequence[Path], count: int, seed: int) -> Tensor:
    """Words in these fonts, of all sizes and contrasts, in noise: [count, 1, HEIGHT, WIDTH].

    Raises: MissingPackageError without fonts.
    """
    from PIL import Image, ImageDraw, ImageFont  # no part of what qtk needs

    if not fonts:
        raise MissingPackageError("no fonts found (Debian: fonts-dejavu)")
    draw, generator, vocabulary = random.Random(seed), np.random.default_rng(seed), words()
    images = []
    while len(images) < count:
        text = " ".join(draw.sample(vocabulary, draw.randint(1, 4)))
        text = draw.choice((text, text.title(), text.upper(), f"{text} {draw.randint(0, 9999)}"))
        font = ImageFont.truetype(str(draw.choice(fonts)), draw.randint(14, 48))
        left, top, right, bottom = (round(edge) for edge in font.getbbox(text))
        margin = draw.randint(2, 6)
        size = right - left + 2 * margin, bottom - top + 2 * margin
        if math.ceil(size[0] * HEIGHT / size[1]) > WIDTH:
            continue
        dark, light = draw.randint(0, 90), draw.randint(150, 255)
        image = Image.new("L", size, light)
        ImageDraw.Draw(image).text((margin - left, margin - top), text, fill=dark, font=font)
        scaled = image.resize((math.ceil(size[0] * HEIGHT / size[1]), HEIGHT), Image.Resampling.BICUBIC)
        pixels = np.pad(np.asarray(scaled, np.float32), ((0, 0), (0, WIDTH - scaled.width)), mode="edge")
        pixels += generator.normal(0, draw.uniform(0, 20), pixels.shape)
        images.append(torch.from_numpy(pixels.clip(0, 255).astype(np.float32) / 127.5 - 1))
    return torch.stack(images).unsqueeze(1)


def read(scores: Tensor) -> list[tuple[int, ...]]:
    """The classes of each line, by CTC: of repeated ones one, without the blank. Shape: scores [N, T, classes]."""
    best = scores.argmax(-1)
    is_new = torch.cat([torch.ones_like(best[:, :1], dtype=torch.bool), best[:, 1:] != best[:, :-1]], 1)
    return [tuple(row[keep & (row > 0)].tolist()) for row, keep in zip(best, is_new, strict=True)]
