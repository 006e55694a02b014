"""Copies of GGUF files."""

import pytest
import torch

from qtk.errors import ExportError
from tests.export.gguf_template import LlamaLike, write_template

gguf = pytest.importorskip("gguf")

from qtk.export.gguf_file import Template, read  # noqa: E402


def test_a_copy_has_the_metadata_and_all_other_tensors(tmp_path):
    model = LlamaLike()
    write_template(model, tmp_path / "float.gguf")
    template = Template(tmp_path / "float.gguf")
    assert template.architecture == "llama"
    assert template.name_of("model.layers.0.self_attn.q_proj.weight") == "blk.0.attn_q.weight"
    assert template.name_of("model.layers.0.self_attn.k_proj.weight") is None  # not in the file
    assert template.name_of("something.else") is None
    assert (template.dtype("output.weight"), template.dtype("blk.0.attn_norm.weight")) == (torch.float16, torch.float32)
    blocks = torch.randint(0, 100, (64, 36), dtype=torch.uint8)
    template.write(tmp_path / "copy.gguf", {"blk.0.attn_v.weight": ("Q4_0", blocks)})
    copy = Template(tmp_path / "copy.gguf")
    assert torch.equal(copy.floats("output.weight"), model.lm_head.weight.detach().half().float())
    found = {field.name: field.contents() for field in copy._reader.fields.values()}
    assert found["general.name"] == "small"
    assert found["tokenizer.ggml.tokens"] == ["a", "b"]
    assert found["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q4_0
    assert list(read(tmp_path / "copy.gguf")) == ["blk.0.attn_v.weight"]
    raw = torch.from_numpy(copy.tensors["blk.0.attn_v.weight"].data.copy())
    assert torch.equal(raw, blocks)
    assert copy.dtype("blk.0.attn_v.weight") is None


def test_a_file_that_is_none(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUFsomething else")
    with pytest.raises(ExportError, match="as GGUF"):
        Template(tmp_path / "x.gguf")
    with pytest.raises(ExportError, match="as GGUF"):
        Template(tmp_path / "missing.gguf")
