"""Simulated weights in a copy of a GGUF file, read by the package gguf."""

from pathlib import Path

import pytest
import torch

import qtk
from qtk.errors import CheckError, ExportError
from qtk.transforms.steps import STEPS, RemoveParameters
from qtk.workflow.export_gguf import _is_stored, _order
from tests.export.gguf_template import LlamaLike, as_llama_cpp, write_template

gguf = pytest.importorskip("gguf")
IDS = torch.arange(12).reshape(2, 6)
BLOCKS = {"dtype": "int4", "granularity": "per_block", "block_size": 32}


def simulated(weight=None, rules=(), model=None):
    config = {"version": 1, "defaults": {"weight": weight or BLOCKS, "activation": "float"}, "rules": [
        {"match": {"op": "layer_norm"}, "weight": "float", "optional": True}, *rules]}
    sim = qtk.QuantSim((model or LlamaLike()).eval(), IDS, config=config)
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


class Tied(LlamaLike):
    def __init__(self):
        super().__init__()
        self.lm_head.weight = self.model.embed_tokens.weight


@pytest.mark.medium
def test_what_stays_in_float_is_that_of_the_template(tmp_path):
    write_template(LlamaLike(), tmp_path / "float.gguf")
    head = {"match": {"lm_head": True}, "weight": "float"}
    norm = "model.layers.0.input_layernorm.weight"
    for parameter, tensor in ((norm, "blk.0.attn_norm.weight"), ("lm_head.weight", "output.weight")):
        sim = simulated(rules=[head])
        qtk.round_scales(sim, torch.float16)
        with torch.no_grad():
            sim.model.get_parameter(parameter)[3] *= 1.01  # bias correction, SmoothQuant, training
        with pytest.raises(ExportError, match=rf"in float.*other numbers.*\n  {parameter} \({tensor}\)"):
            qtk.export_gguf(sim, tmp_path / "out.gguf", template=tmp_path / "float.gguf")
    changed = LlamaLike()
    changed.load_state_dict({name: tensor for name, tensor in sim.model.state_dict().items()
                             if name in changed.state_dict()})
    write_template(changed, tmp_path / "again.gguf")
    qtk.export_gguf(sim, tmp_path / "out.gguf", template=tmp_path / "again.gguf")
    weight = changed.lm_head.weight.detach()
    assert torch.equal(tensors_of(tmp_path / "out.gguf")["output.weight"], weight.half().float())


@pytest.mark.parametrize(("stored", "is_stored"), [
    (lambda w: w, True), (lambda w: w.half(), True), (lambda w: 1 + w, True), (lambda w: -w.exp(), True),
    (lambda w: w[:, None], True), (lambda w: w.flip(0), True), (lambda w: 1.01 * w, False), (lambda w: w[1:], False),
    (lambda w: w + 1e-3, False),
])
def test_how_the_converter_stores_a_parameter(stored, is_stored):
    w = torch.linspace(-1, 2, 10)
    assert _is_stored(stored(w).float(), stored(w).dtype, w) is is_stored


@pytest.mark.medium
def test_a_tied_weight_has_one_form(tmp_path):
    write_template(Tied(), tmp_path / "untied.gguf")
    norm = {"match": {"op": "layer_norm"}, "weight": "float"}
    for op in ("linear", "embedding"):
        sim = simulated({**BLOCKS, "dtype": "int8"}, [{"match": {"op": op}, "weight": BLOCKS}, norm], model=Tied())
        qtk.round_scales(sim, torch.float16)
        with pytest.raises(ExportError, match=r"is read in float, or by another quantizer, too"):
            qtk.export_gguf(sim, tmp_path / "out.gguf", template=tmp_path / "untied.gguf")
    sim = simulated(model=Tied())
    qtk.round_scales(sim, torch.float16)
    types = qtk.export_gguf(sim, tmp_path / "out.gguf", template=tmp_path / "untied.gguf")
    assert types["output.weight"] == types["token_embd.weight"] == "Q4_0"  # stored twice in this template
    found = tensors_of(tmp_path / "out.gguf")
    assert torch.equal(found["output.weight"], found["token_embd.weight"])
    with pytest.raises(ExportError, match=r"both blk.0.attn_v.weight .*; say which tensor each is, names="):
        qtk.export_gguf(sim, tmp_path / "out.gguf", template=tmp_path / "untied.gguf", force=True,
                        names={"model.layers.0.self_attn.q_proj.weight": "blk.0.attn_v.weight"})
    with pytest.raises(ExportError, match=r"names={'model.embed_token.weight': …}.*did you mean 'model.embed_tokens"):
        qtk.export_gguf(sim, tmp_path / "out.gguf", template=tmp_path / "untied.gguf", force=True,
                        names={"model.embed_token.weight": "token_embd.weight"})


@pytest.mark.medium
def test_a_simulation_that_no_file_can_be(tmp_path, monkeypatch):
    write_template(LlamaLike(), tmp_path / "float.gguf")
    sim = simulated()
    sim.quantizers["lm_head.weight"].mode = qtk.Mode.BYPASS
    with monkeypatch.context() as patch:
        patch.setitem(sim.model.meta, STEPS, (RemoveParameters(()),))
        patch.setattr(sim.quantizers["lm_head.weight"], "mode", qtk.Mode.SIMULATE)
        with pytest.raises(ExportError, match=r"changed the ops of the model \(RemoveParameters\)"):
            qtk.export_gguf(sim, tmp_path / "out.gguf", template=tmp_path / "float.gguf")
    with pytest.raises(CheckError, match="passes values through"):
        qtk.export_gguf(sim, tmp_path / "out.gguf", template=tmp_path / "float.gguf")


def test_rows_that_are_alike_are_told_apart():
    torch.manual_seed(0)
    weight = 10 + torch.randn(64, 64)  # in place, another order is off by 2 % of the sum of squares
    order = torch.randperm(64)
    assert torch.equal(_order(weight[order].half().float(), weight, "w", Path("f")), order)
    same = torch.ones(8, 64)
    same[5:] = -2
    assert torch.equal(_order(same, same * 1.05, "w", Path("f")), torch.arange(8))
