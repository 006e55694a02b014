"""Whole models in ONNX Runtime's optimized graph: no product is left in float, whatever model."""

from collections import Counter

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import qtk
from qtk.export.onnx.session import create_session

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
     # 12 blocks: 5 with shifted windows add twice to the scores, which have a quantizer; 3 reductions feed a norm
     {"QLinearConv": 1, "QGemm": 49, "MatMulIntegerToFloat": 7 + 3, "QLinearMatMul": 12 + 5}),
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
