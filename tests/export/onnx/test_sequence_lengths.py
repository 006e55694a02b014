"""One ONNX operator a layer with ``sequence_lens``, in ONNX Runtime against torch's packed kernels."""

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import qtk
from qtk.export.onnx.qdq import export
from tests.export.onnx.simulated import run_onnx
from tests.zoo import packed
from tests.zoo.packed import sequences


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(("kind", "options"), [
    (nn.LSTM, {"num_layers": 2}), (nn.GRU, {"batch_first": False}), (nn.LSTM, {"bidirectional": False, "bias": False}),
])
def test_the_operator_is_the_net_for_each_length(kind, options, tmp_path):
    torch.manual_seed(0)
    model = packed.ToLongest(kind=kind, **options).eval()
    time_first = not model.rnn.batch_first
    prepared = qtk.prepare_model(model, sequences(time_first=time_first), dynamic_shapes="all")
    export(prepared, sequences(time_first=time_first), tmp_path / "model.onnx")
    graph = onnx.load(tmp_path / "model.onnx").graph
    nets = [node for node in graph.node if node.op_type in ("LSTM", "GRU")]
    assert len(nets) == model.rnn.num_layers
    assert all(node.input[4] for node in nets)
    assert "Scan" not in {node.op_type for node in graph.node}
    for lengths in ([5, 1, 3, 3], [2], [1, 4]):
        x, lengths = sequences(lengths=lengths, seed=1, time_first=time_first)
        with torch.no_grad():
            outputs, counted, states = model(x, lengths)
        expected = [outputs, counted, *(states if isinstance(states, tuple) else [states])]
        for found, wanted in zip(run_onnx(tmp_path / "model.onnx", x, lengths), expected, strict=True):
            assert found.shape == tuple(wanted.shape)
            assert np.abs(found - wanted.numpy()).max() < 1e-5
