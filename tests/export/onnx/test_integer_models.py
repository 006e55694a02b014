"""Whole models in ONNX Runtime's optimized graph: no product is left in float, whatever model."""

from collections import Counter

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import qtk
from qtk.runtimes.session import create_session

FLOAT_PRODUCTS = {"Conv", "FusedConv", "NhwcFusedConv", "Gemm", "FusedGemm", "MatMul", "FusedMatMul", "MatMulNBits"}


class Encoder(nn.Module):
    """Embeddings, post-norm layers with fused attention, a head with tanh on the first token."""

    def __init__(self, width=32, layers=1):
        super().__init__()
        self.words, self.norm = nn.Embedding(50, width), nn.LayerNorm(width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, activation="gelu", batch_first=True) for _ in range(layers)
        )
        self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, tokens):
        x = self.norm(self.words(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.pooler(x[:, 0]).tanh())


def exported(model, x, folder):
    torch.manual_seed(0)
    sim = qtk.QuantSim(model.eval(), x, config="onnxruntime")
    sim.compute_encodings([x], progress=False)
    sim.export(folder, formats=["onnx"])
    create_session(folder / "model.onnx", threads=1, optimized_file=folder / "optimized.onnx")
    return sim, Counter(node.op_type for node in onnx.load(folder / "optimized.onnx").graph.node)


@pytest.mark.slow
def test_an_encoder_layer_runs_in_integers_as_simulated(tmp_path):
    torch.manual_seed(0)
    x = torch.randint(50, (2, 6))
    sim, kinds = exported(Encoder(), x, tmp_path / "out")
    assert not FLOAT_PRODUCTS & kinds.keys()
    assert (kinds["QGemm"], kinds["MatMulIntegerToFloat"], kinds["QLinearMatMul"]) == (6, 1, 1)  # scores into softmax
    scale = float(sim.encodings()["head:out"].scale)
    expected = sim.model(x).detach().numpy()
    for optimized in (False, True):
        session, _ = create_session(tmp_path / "out" / "model.onnx", optimized=optimized)
        (got,) = session.run(None, {"tokens": x.numpy()})
        assert np.abs(got - expected).max() / scale < 1.01


class ShiftedWindows(nn.Module):
    """Attention of a swin transformer: windows of a rolled image, scores with a position bias and a mask."""

    def __init__(self, scores, width=8, side=6, window=3):
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.scores, self.side, self.window = scores, side, window
        length, count = window**2, (side // window) ** 2
        self.table = nn.Parameter(torch.randn(2 * length, 1))
        self.register_buffer("index", torch.arange(length)[:, None] + torch.arange(length))
        self.register_buffer("mask", torch.where(torch.rand(count, length, length) > 0.7, -100.0, 0.0))

    def forward(self, x):
        batch, width, cut = len(x), x.shape[-1], (self.side // self.window, self.window)
        y = torch.roll(self.norm(x), (-1, -1), (1, 2)).unflatten(2, cut).unflatten(1, cut).transpose(2, 3)
        q, k, v = self.qkv(y.reshape(-1, self.window**2, width)).chunk(3, -1)
        bias = self.table[self.index.flatten()].view(self.window**2, self.window**2, -1).movedim(-1, 0)
        scores = self.scores(q @ k.transpose(-1, -2), bias, self.mask)
        y = self.proj(scores.softmax(-1) @ v)
        y = y.unflatten(0, (batch, cut[0], cut[0])).unflatten(-2, (cut[1], cut[1])).transpose(2, 3)
        return torch.roll(y.flatten(3, 4).flatten(1, 2).view_as(x), (1, 1), (1, 2))


def windows(scores, mask):
    return scores.view(-1, len(mask), *scores.shape[1:])


SCORES = {
    "bias, mask": lambda scores, bias, mask: (windows(scores + bias, mask) + mask).flatten(0, 1),
    "mask, bias": lambda scores, bias, mask: (windows(scores, mask) + mask).flatten(0, 1) + bias,
    "scaled": lambda scores, bias, mask: (windows(scores * 0.3 + bias, mask) + mask).flatten(0, 1),
    "mask_fill": lambda scores, bias, mask: (
        windows(scores / 3 + bias, mask).masked_fill(mask < 0, -torch.inf).flatten(0, 1)
    ),
}


@pytest.mark.medium
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", list(SCORES))
def test_scores_with_bias_and_mask_reach_softmax_in_float(name, tmp_path):
    torch.manual_seed(0)
    x, folder = torch.randn(2, 6, 6, 8), tmp_path / "out"
    sim, kinds = exported(ShiftedWindows(SCORES[name]), x, folder)
    assert not FLOAT_PRODUCTS & kinds.keys()
    assert (kinds["QGemm"], kinds["MatMulIntegerToFloat"], kinds["QLinearMatMul"]) == (2, 1, 1)
    graph = onnx.load(folder / "optimized.onnx").graph
    dequantized = {node.input[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    assert dequantized == {"x:input/uint8", "output_1"}  # neither the mask nor the table of the bias
    scale = float(sim.encodings()["proj:out"].scale)
    for optimized in (False, True):
        session, _ = create_session(folder / "model.onnx", optimized=optimized)
        (got,) = session.run(None, {"x": x.numpy()})
        assert np.abs(got - sim.model(x).detach().numpy()).max() / scale < 1.01


def images(size):
    return torch.randn(2, 3, size, size)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "integer"), [
    ("resnet18", 64, {"QLinearConv": 20, "QLinearAdd": 8, "QLinearGlobalAveragePool": 1, "QGemm": 1}),
    ("mobilenetv2_100", 64, {"QLinearConv": 52, "QLinearAdd": 10, "QLinearGlobalAveragePool": 1, "QGemm": 1}),
    ("mobilenetv3_small_100", 64,
     # 6 residual sums, 28 hard sigmoids
     {"QLinearConv": 53, "QLinearAdd": 6 + 28, "QLinearGlobalAveragePool": 10, "QGemm": 1}),
    ("vit_tiny_patch16_224", 224, {"QLinearConv": 1, "QGemm": 49, "MatMulIntegerToFloat": 12, "QLinearMatMul": 12}),
    ("swin_tiny_patch4_window7_224", 224,
     # the scores of 12 blocks; 3 reductions feed a norm
     {"QLinearConv": 1, "QGemm": 49, "MatMulIntegerToFloat": 12 + 3, "QLinearMatMul": 12}),
])
def test_models_of_timm_run_in_integers(name, size, integer, tmp_path):
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    _, kinds = exported(timm.create_model(name), images(size), tmp_path / "out")
    assert not FLOAT_PRODUCTS & kinds.keys()
    assert {kind: kinds[kind] for kind in integer} == integer
    assert not kinds["Relu"]


@pytest.mark.slow
def test_a_bert_runs_in_integers(tmp_path):
    torch.manual_seed(0)
    _, kinds = exported(Encoder(width=384, layers=4), torch.randint(50, (2, 16)), tmp_path / "out")
    assert not FLOAT_PRODUCTS & kinds.keys()
    assert (kinds["QGemm"], kinds["MatMulIntegerToFloat"], kinds["QLinearMatMul"]) == (18, 4, 4)
