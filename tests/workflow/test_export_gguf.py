"""Simulated weights in a copy of a GGUF file, read by the package gguf."""

import pytest
import torch

import qtk
from qtk.errors import ExportError
from tests.export.gguf_template import LlamaLike, as_llama_cpp, write_template

gguf = pytest.importorskip("gguf")
IDS = torch.arange(12).reshape(2, 6)


def simulated(weight=None, rules=()):
    blocks = weight or {"dtype": "int4", "granularity": "per_block", "block_size": 32}
    config = {"version": 1, "defaults": {"weight": blocks, "activation": "float"}, "rules": [
        {"match": {"op": "layer_norm"}, "weight": "float", "optional": True}, *rules]}
    sim = qtk.QuantSim(LlamaLike().eval(), IDS, config=config)
    sim.compute_encodings(None, progress=False)
    return sim


def tensors_of(path):
    return {tensor.name: torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
            for tensor in gguf.GGUFReader(path).tensors}


def as_simulated(sim, name):
    return sim.quantizers[name](sim.model.get_parameter(name)).detach()


@pytest.mark.medium
def test_the_file_is_the_simulation(tmp_path):
    eight = {"match": {"lm_head": True}, "weight": {"dtype": "int8", "granularity": "per_block", "block_size": 32}}
    sim = simulated(rules=[eight])
    write_template(LlamaLike(), tmp_path / "float.gguf")
    with pytest.raises(ExportError, match="float16 scales"):
        qtk.export_gguf(sim, tmp_path / "out.gguf", template=tmp_path / "float.gguf")
    qtk.round_scales(sim, torch.float16)
    types = qtk.export_gguf(sim, tmp_path / "out.gguf", template=tmp_path / "float.gguf")
    assert types == {"token_embd.weight": "Q4_0", "blk.0.attn_q.weight": "Q4_0", "blk.0.attn_v.weight": "Q4_0",
                     "output.weight": "Q8_0"}
    found = tensors_of(tmp_path / "out.gguf")
    inner = "model.layers.0.self_attn"
    assert torch.equal(found["output.weight"], as_simulated(sim, "lm_head.weight"))
    assert torch.equal(found["token_embd.weight"], as_simulated(sim, "model.embed_tokens.weight"))
    assert torch.equal(found["blk.0.attn_v.weight"], as_simulated(sim, f"{inner}.v_proj.weight"))
    assert torch.equal(found["blk.0.attn_q.weight"], as_llama_cpp(as_simulated(sim, f"{inner}.q_proj.weight")))
    assert torch.equal(found["blk.0.attn_norm.weight"], torch.ones(64))
    with pytest.raises(ExportError, match="exists; pass force=True"):
        qtk.export_gguf(sim, tmp_path / "out.gguf", template=tmp_path / "float.gguf")


@pytest.mark.medium
def test_asymmetric_blocks_are_off_by_the_float16_of_their_minimum(tmp_path):
    sim = simulated({"dtype": "uint4", "symmetric": False, "granularity": "per_block", "block_size": 32})
    write_template(LlamaLike(), tmp_path / "float.gguf")
    qtk.round_scales(sim, torch.float16)
    with pytest.warns(UserWarning, match="the float16 minimum of Q4_1"):
        types = qtk.export_gguf(sim, tmp_path / "out.gguf", template=tmp_path / "float.gguf")
    assert set(types.values()) == {"Q4_1"}
    value = as_simulated(sim, "lm_head.weight")
    assert (tensors_of(tmp_path / "out.gguf")["output.weight"] - value).abs().max() < 2.0**-11 * value.abs().max()


@pytest.mark.medium
def test_what_is_refused(tmp_path):
    other = LlamaLike()
    torch.nn.init.normal_(other.lm_head.weight)
    write_template(other, tmp_path / "other.gguf")
    sim = simulated()
    qtk.round_scales(sim, torch.float16)
    with pytest.raises(ExportError, match=r"of another model: the rows of lm_head.weight"):
        qtk.export_gguf(sim, tmp_path / "out.gguf", template=tmp_path / "other.gguf")
    with pytest.raises(ExportError, match=r"lm_head.weight has no tensor in .* names={'lm_head.weight': 'blk"):
        qtk.export_gguf(sim, tmp_path / "out.gguf", template=tmp_path / "other.gguf", names={"lm_head.weight": "none"})
    with pytest.raises(ExportError, match=r"lm_head.weight is int8 per_tensor"):
        qtk.export_gguf(simulated({"dtype": "int8"}), tmp_path / "out.gguf", template=tmp_path / "other.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["other.gguf"]
