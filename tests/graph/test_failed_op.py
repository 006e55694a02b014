"""The op of a captured graph that an error comes from."""

import pytest
import torch
from torch import nn

import qtk
from qtk.graph.failed_op import _tensor_text, failed_op

IDS = torch.zeros(2, 3, dtype=torch.long)


def lookup():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4)).eval()


def test_the_op_and_its_inputs_are_named():
    prepared = qtk.prepare_model(lookup(), IDS)
    with pytest.raises(IndexError) as caught:
        prepared(IDS + 30)
    assert failed_op(caught.value) == "0:out (float32 [10, 8], int64 [2, 3] of 30…30)"


def test_an_error_elsewhere_has_no_op():
    with pytest.raises(ZeroDivisionError) as caught:
        1 / 0  # noqa: B018
    assert failed_op(caught.value) is None


@pytest.mark.parametrize(("tensor", "text"), [
    (torch.ones(2, dtype=torch.uint16), "uint16 [2]"),
    (torch.ones(2, dtype=torch.uint64), "uint64 [2]"),
    (torch.ones(2, dtype=torch.long, device="meta"), "int64 [2]"),
    (torch.ones(2).bool(), "bool [2]"),
])
def test_a_tensor_without_a_minimum_has_a_text(tensor, text):
    assert _tensor_text(tensor) == text


def test_a_tensor_that_can_no_longer_be_read_has_no_range(monkeypatch):
    def refuse(tensor):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.Tensor, "min", refuse)
    assert _tensor_text(IDS) == "int64 [2, 3]"


class Table(nn.Module):
    """A parameter, a sum and a lookup."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(10, 8))

    def forward(self, ids):
        return (self.rows + 1)[ids] * 2


@pytest.mark.parametrize(("net", "named"), [(Table, "gather:out"), (lookup, "0:out")])
def test_the_op_of_a_graph_that_runs_as_a_function(net, named):
    prepared = qtk.prepare_model(net().eval(), IDS)
    with torch.no_grad():
        for _ in range(3):
            prepared(IDS)
        with pytest.raises(IndexError) as caught:
            prepared(IDS + 30)
    assert any(frame.name == "run" for frame in caught.traceback)
    assert failed_op(caught.value) == f"{named} (float32 [10, 8], int64 [2, 3] of 30…30)"
