"""The time of the ops of a model, whose kernels each take 1 ms here."""

import pytest
import torch
from torch import nn

pytest.importorskip("onnxruntime")

from qtk.runtimes import op_times as module
from tests.runtimes.test_kernel_times import exported


@pytest.fixture
def medians(monkeypatch):
    listed = []
    monkeypatch.setattr(module.statistics, "median", lambda times: listed.append(times) or 1.0)
    return listed


@pytest.mark.medium
def test_the_time_of_an_op_is_that_of_all_its_nodes(tmp_path, medians):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(6, 5)

        def forward(self, x):
            return self.fc(torch.relu(self.conv(x)).mean((1, 2)))

    x = torch.randn(2, 1, 8, 8)
    times = module.op_times(exported(Net(), x, tmp_path / "out"), {"x": x}, turns=3)
    assert [kind for kind, _ in times["x"]] == ["QuantizeLinear"]
    assert "QLinearConv" in [kind for kind, _ in times["conv"]]
    assert "fc" in times
    assert all(len(each) == 3 for each in medians)


@pytest.mark.medium
def test_a_node_in_a_loop_counts_as_often_as_it_runs(tmp_path, medians):
    x = torch.randn(5, 2, 4)
    rule = {"match": {"op": "lstm"}, "inside": "quantized"}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 3)

        def forward(self, x):
            return self.lstm(x)[0]

    file = exported(Net(), x, tmp_path / "out", rules=[rule])
    times = module.op_times(file, {"x": x}, turns=2)
    assert any(ms == 5.0 for nodes in times.values() for _, ms in nodes)  # 5 steps, of which each takes 1 ms
