"""Models of transformers: their configs and names in checkpoints."""

import pytest
import torch
from torch import nn

import qtk
from qtk.export.compressed_tensors.original import OriginalModel

transformers = pytest.importorskip("transformers")


@pytest.mark.slow
def test_experts_are_taken_apart_as_they_are_saved():
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=16, num_local_experts=3)).eval()
    prepared = qtk.prepare_model(model, {"input_ids": torch.ones(1, 8, dtype=torch.long), "use_cache": False})
    found = OriginalModel.of(prepared)
    assert found.config()["architectures"] == ["MixtralForCausalLM"]
    assert found.config()["num_local_experts"] == 3
    name = "model.layers.0.mlp.experts.gate_up_proj"
    parts = found.stored({name: model.state_dict()[name]})
    assert sorted(parts) == [f"model.layers.0.block_sparse_moe.experts.{expert}.{part}.weight"
                             for expert in range(3) for part in ("w1", "w3")]
    joined = torch.cat([parts[f"model.layers.0.block_sparse_moe.experts.1.{part}.weight"] for part in ("w1", "w3")])
    assert torch.equal(joined, model.state_dict()[name][1])
    assert "lm_head" in found.linear_modules()
    assert next(found.module.parameters()).is_meta


def test_other_models_have_none():
    assert OriginalModel.of(qtk.prepare_model(nn.Linear(4, 4).eval(), torch.randn(2, 4))) is None
    assert OriginalModel.of(nn.Linear(4, 4)) is None
