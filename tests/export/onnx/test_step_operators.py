"""Which operator each layer of a recurrent net becomes, and that all of them compute the simulation."""

from collections import Counter

import onnx
import pytest
import torch
from torch import nn

import qtk
from qtk.export.onnx.qdq import export
from qtk.torch_private import pytree
from tests.export.onnx.onnxruntime.test_dynamic_lstms import exported, run, sqnr_db

I, H = 6, 8  # noqa: E741
X = torch.randn(5, 3, I)
OPERATORS = ("DynamicQuantizeLSTM", "LSTM", "GRU", "Scan")


class Cell(nn.Module):
    """A cell whose states are handed from call to call."""

    def __init__(self, kind):
        super().__init__()
        self.cell = kind(I, H)

    def forward(self, x, *states):
        new = self.cell(x, states if len(states) > 1 else states[0])
        return new if isinstance(new, tuple) else (new,)


def operators(file):
    counts = Counter(node.op_type for node in onnx.load(file).graph.node)
    return {kind: counts[kind] for kind in OPERATORS if counts[kind]}


def layers(*rules, base="onnxruntime"):
    return {"version": 1, "extends": base, "rules": [{"match": {"path": path}, "inside": how} for path, how in rules]}


def assert_computed(sim, given, file, least_db=110):
    with torch.no_grad():
        expected = pytree.tree_leaves(sim.model(*given))
    for found, ours in zip(run(file, given), expected, strict=True):
        assert sqnr_db(found, ours.numpy()) > least_db


@pytest.mark.sample(1)
@pytest.mark.medium
def test_layers_become_the_operator_of_their_profile(tmp_path):
    sim = exported(nn.LSTM(I, H, 3), (X,), tmp_path / "out", layers(("lstm.l0", "float"), ("lstm.l2", "int16_state")))
    file = tmp_path / "out" / "model.onnx"
    assert operators(file) == {"DynamicQuantizeLSTM": 1, "LSTM": 1, "Scan": 1}
    assert_computed(sim, (X,), file, least_db=30)  # a tie may fall the other way, once in 8 bits


@pytest.mark.slow
def test_one_direction_can_be_float(tmp_path):
    sim = exported(nn.LSTM(I, H, bidirectional=True), (X,), tmp_path / "out", layers(("lstm.l0_reverse", "float")))
    assert operators(tmp_path / "out" / "model.onnx") == {"DynamicQuantizeLSTM": 1, "LSTM": 1}
    assert_computed(sim, (X,), tmp_path / "out" / "model.onnx")


@pytest.mark.medium
@pytest.mark.parametrize(("kind", "expected"), [
    (nn.LSTMCell, {"DynamicQuantizeLSTM": 1}), pytest.param(nn.GRUCell, {"GRU": 1}, marks=pytest.mark.slow),
])
def test_a_cell_is_one_operator(kind, expected, tmp_path):
    given = (torch.randn(3, I), *(torch.randn(3, H) * 0.3 for _ in range(1 + (kind is nn.LSTMCell))))
    sim = exported(Cell(kind), given, tmp_path / "out")
    assert operators(tmp_path / "out" / "model.onnx") == expected
    assert_computed(sim, given, tmp_path / "out" / "model.onnx")


@pytest.mark.medium
@pytest.mark.parametrize(("net", "expected"), [
    pytest.param(lambda: nn.LSTM(I, H, proj_size=4), {"Scan": 1}, marks=pytest.mark.slow),
    (lambda: nn.GRU(I, H, 2), {"GRU": 2}),
])
def test_what_has_no_such_operator_is_as_it_was(net, expected, tmp_path):
    sim = exported(net(), (X,), tmp_path / "out")
    assert operators(tmp_path / "out" / "model.onnx") == expected
    assert_computed(sim, (X,), tmp_path / "out" / "model.onnx")


@pytest.mark.slow
def test_half_precision_is_float_inside(tmp_path):
    sim = exported(nn.LSTM(I, H).half(), (X.half(),), tmp_path / "out")
    assert operators(tmp_path / "out" / "model.onnx") == {"LSTM": 1}
    assert_computed(sim, (X.half(),), tmp_path / "out" / "model.onnx", least_db=40)


@pytest.mark.slow
def test_without_a_runtime_the_file_holds_standard_operators(tmp_path):
    config = {"version": 1, "rules": [{"match": {"op": "lstm"}, "inside": "dynamic"}]}
    sim = exported(nn.LSTM(I, H), (X,), tmp_path / "out", config)
    assert operators(tmp_path / "out" / "model.onnx") == {"Scan": 1}
    assert {each.domain for each in onnx.load(tmp_path / "out" / "model.onnx").opset_import} <= {"", "qtk"}
    assert_computed(sim, (X,), tmp_path / "out" / "model.onnx", least_db=30)


@pytest.mark.slow
def test_a_weight_that_is_left_in_float_leaves_no_operator_with_codes(tmp_path):
    sim = exported(nn.LSTM(I, H), (X,), tmp_path / "first")
    sim.quantizers["weight_hh_l0"].mode = qtk.Mode.BYPASS
    export(sim.model, X, tmp_path / "model.onnx", contrib_operators=True)
    assert operators(tmp_path / "model.onnx") == {"Scan": 1}
    assert_computed(sim, (X,), tmp_path / "model.onnx", least_db=30)
