"""The list of rewrites for ONNX Runtime: their order, what each is for, and that running them again changes nothing."""

import re
import warnings
from collections import Counter
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import qtk
from qtk.export.onnx import qdq
from qtk.export.onnx.onnxruntime.passes import AFTER_SITES_ARE_LISTED, BEFORE_SITES_ARE_LISTED
from qtk.runtimes.session import create_session, opens_in_exact_mode
from tests.export.onnx.onnxruntime.test_int8_movement import Moved, config
from tests.export.onnx.onnxruntime.test_linear_nodes import Product, mlp
from tests.export.onnx.onnxruntime.test_separate_weights import Twice
from tests.export.onnx.optimized import kinds
from tests.exported_files import leave_out

PASSES = (*BEFORE_SITES_ARE_LISTED, *AFTER_SITES_ARE_LISTED)


def test_each_is_named_once_and_comes_after_what_it_reads():
    names = [each.name for each in PASSES]
    assert Counter(names).most_common(1)[0][1] == 1
    for index, each in enumerate(PASSES):
        assert set(each.after) <= set(names[:index])


class Gated(nn.Module):
    """The gate of a squeeze-and-excitation block: a hard sigmoid of [N, C, 1, 1], to which a scalar is added."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        return nn.functional.hardsigmoid(nn.functional.adaptive_avg_pool2d(self.conv(x), 1))


def runs(path):
    try:
        create_session(path)
    except Exception:
        return False
    return True


def scalars(path):
    return sum(not tensor.dims for tensor in onnx.load(path).graph.initializer if tensor.name == "qtk.three.code")


def unread(path):
    graph = onnx.load(path).graph
    read = {name for node in graph.node for name in node.input} | {each.name for each in graph.output}
    return sum(read.isdisjoint(node.output) for node in graph.node)


def zeros(path):
    return sum(tensor.name.endswith("weight.zero_point") for tensor in onnx.load(path).graph.initializer)


ALONE = {
    "fuse_linear_layers": (mlp, (4, 64), "dynamic", lambda path: kinds(path)["DynamicQuantizeMatMul"], 2, 0),
    "rank_scalars": (Gated, (2, 3, 8, 8), "onnxruntime", scalars, 0, 1),
    "quantize_around_movement": (Moved, (2, 3, 8, 8), config("per_channel"), runs, True, False),
    "drop_zeros_of_convolutions": (lambda: nn.Conv2d(3, 8, 3), (2, 3, 8, 8), "onnxruntime", zeros, 0, 1),
    "remove_unused": (lambda: nn.Sequential(nn.Hardsigmoid(), nn.Linear(8, 8)), (4, 8), "onnxruntime", unread, 0, 1),
    "multiply_stacks": (lambda: Product(3, 64, 8), (3, 5, 64), "onnxruntime",
                        lambda path: kinds(path)["QLinearMatMul"] + kinds(path)["MatMulIntegerToFloat"], 1, 0),
    "separate_weights": (lambda: Twice(nn.Linear(32, 32)), (4, 32), "default", opens_in_exact_mode, True, False),
}
"""Rewrite → model, shape of its input, config, a fact of the file, that fact with the rewrite and without."""


def written(model, x, folder, given, opset=None):
    sim = qtk.QuantSim(model.eval(), x, config=given)
    sim.compute_encodings([x], progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sim.export(folder, formats=["onnx"], check=False, opset=opset)
    return folder / "model.onnx"


@pytest.mark.sample(4)
@pytest.mark.medium
@pytest.mark.parametrize("name", ALONE)
def test_without_it(name, tmp_path, monkeypatch):
    make, shape, given, fact, present, absent = ALONE[name]
    torch.manual_seed(0)
    model, x, opset = make(), torch.randn(shape), 21 if name == "quantize_around_movement" else None
    assert fact(written(model, x, tmp_path / "with", given, opset)) == present
    leave_out(monkeypatch, name)
    assert fact(written(model, x, tmp_path / "without", given, opset)) == absent


def test_a_test_leaves_out_each():
    sources = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    left_out = set(re.findall(r'leave_out\(\w+, "(\w+)"\)', sources)) | ALONE.keys()
    assert {each.name for each in PASSES} == left_out


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize(("make", "shape", "given"), [
    (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Hardswish(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                           nn.Linear(8, 4), nn.Softmax(-1)), (2, 3, 8, 8), "onnxruntime"),
    (lambda: nn.TransformerEncoderLayer(32, 2, 48, activation="gelu", batch_first=True), (2, 7, 32), "default"),
    (mlp, (4, 64), "dynamic"),
    (lambda: nn.GRU(8, 16, batch_first=True), (2, 5, 8), "default"),
    (Moved, (2, 3, 8, 8), config("per_channel")),
    (lambda: Product(3, 64, 8), (3, 5, 64), "onnxruntime"),
])
def test_they_leave_what_they_have_rewritten(make, shape, given, tmp_path, monkeypatch):
    torch.manual_seed(0)
    model, x = make(), torch.randn(shape)
    once = written(model, x, tmp_path / "once", given).read_bytes()
    for stage in ("BEFORE_SITES_ARE_LISTED", "AFTER_SITES_ARE_LISTED"):
        monkeypatch.setattr(qdq, stage, 2 * getattr(qdq, stage))
    assert written(model, x, tmp_path / "twice", given).read_bytes() == once
