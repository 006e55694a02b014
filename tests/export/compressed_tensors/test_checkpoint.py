"""Tensors of checkpoints: shards, tied tensors."""

import json

import pytest
import torch
from torch import nn

from qtk.errors import ExportError
from qtk.export.compressed_tensors import checkpoint
from qtk.export.compressed_tensors.layers import layers_of
from tests.export.compressed_tensors.models import simulated


@pytest.mark.medium
def test_shards_have_an_index(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    original = hub.split_torch_state_dict_into_shards
    monkeypatch.setattr(hub, "split_torch_state_dict_into_shards", lambda state: original(state, max_shard_size=100))
    tensors = {name: torch.randn(5, 4) for name in "abc"}
    checkpoint.write(tensors, tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {"a", "b", "c"}
    assert len(set(index["weight_map"].values())) == 3
    found = checkpoint.read(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


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
