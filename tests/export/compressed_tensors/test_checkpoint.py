"""Tensors of checkpoints: tied tensors."""

import pytest
import torch
from torch import nn

from qtk.errors import ExportError
from qtk.export.compressed_tensors import checkpoint
from qtk.export.compressed_tensors.layers import layers_of
from tests.export.compressed_tensors.models import simulated


class Tied(nn.Module):
    def __init__(self, of):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(32, 32, bias=False) for _ in range(3))
        self.b.weight = getattr(self, of).weight

    def forward(self, x):
        return self.c(self.b(self.a(x).relu()))


@pytest.mark.medium
def test_a_tied_tensor_is_stored_once_and_a_packed_one_is_not_shared():
    x = torch.randn(2, 32)
    in_float = {"match": {"path": ["a", "b"]}, "weight": "float"}
    sim = simulated(Tied("a"), {"dtype": "int4"}, [in_float], x)
    assert list(checkpoint.other_tensors(sim.model, layers_of(sim.model).quantized)) == ["a.weight"]
    sim = simulated(Tied("c"), {"dtype": "int4"}, [{"match": {"path": "a"}, "weight": "float"}], x)
    with pytest.raises(ExportError, match=r"c\.weight shares the memory of b\.weight"):
        checkpoint.other_tensors(sim.model, layers_of(sim.model).quantized)


@pytest.mark.medium
@pytest.mark.parametrize("weight", [
    {"dtype": "int4", "granularity": "per_block", "block_size": 32}, {"dtype": "int8", "granularity": "per_channel"},
    {"dtype": "fp8_e4m3", "granularity": "per_channel"}, {"dtype": "uint4", "granularity": "per_channel"},
    {"dtype": "int8", "granularity": "per_tensor"},
], ids=lambda weight: f"{weight['dtype']} {weight['granularity']}")
def test_a_weight_stored_a_few_rows_at_a_time_is_the_whole_one(weight, monkeypatch):
    pytest.importorskip("compressed_tensors")
    torch.manual_seed(0)
    sim = simulated(nn.Linear(64, 37), weight, x=torch.randn(2, 64))
    layers = layers_of(sim.model).quantized.values()
    whole, = (each for layer in layers for each in checkpoint.stored_layers(layer, None, None))
    monkeypatch.setattr(checkpoint, "AT_ONCE", 5 * 64)
    found, = (each for layer in layers for each in checkpoint.stored_layers(layer, None, None))
    assert found.tensors.keys() == whole.tensors.keys()
    assert found.path == whole.path
    for end, tensor in whole.tensors.items():
        other = found.tensors[end]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), end
        assert torch.equal(other.contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)), end
