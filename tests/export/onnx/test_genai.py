"""The file of a decoder under the names of onnxruntime-genai, run as that runtime does."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import ExportError
from qtk.runtimes.session import FLOAT_PRODUCTS

ort = pytest.importorskip("onnxruntime")
CONFIG = SimpleNamespace(vocab_size=30, hidden_size=16, num_attention_heads=2, max_position_embeddings=64,
                         bos_token_id=1, eos_token_id=None, pad_token_id=0)


class Decoder(nn.Module):
    """Takes and returns keys and values [samples, heads, tokens, size]."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.config = CONFIG
        self.embed, self.qkv, self.head = nn.Embedding(30, 16), nn.Linear(16, 48), nn.Linear(16, 30)

    def forward(self, input_ids, past=None):
        query, key, value = (part.unflatten(-1, (2, 8)).transpose(1, 2)
                             for part in self.qkv(self.embed(input_ids)).chunk(3, -1))
        if past is not None:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
        at = torch.arange(key.shape[2])
        mask = at <= at[key.shape[2] - query.shape[2]:, None]
        x = nn.functional.scaled_dot_product_attention(query, key, value, mask)
        return {"logits": self.head(x.transpose(1, 2).flatten(2)), "present": [key, value]}


def ids(count, seed=0):
    return torch.randint(30, (2, count), generator=torch.Generator().manual_seed(seed))


def simulation(call):
    sim = qtk.QuantSim(Decoder().eval(), call, activation_bits=None, dynamic_shapes="all")
    sim.compute_encodings(None)
    return sim


@pytest.mark.slow
def test_a_prompt_and_a_step_of_the_file_are_the_simulation(tmp_path):
    model = Decoder().eval()
    sim = simulation({"input_ids": ids(3), "past": [each.detach() for each in model(ids(5))["present"]]})
    sim.export(tmp_path / "out", formats="onnx_genai")
    folder = tmp_path / "out" / "genai"
    config = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
    decoder = config["model"]["decoder"]
    assert (decoder["num_key_value_heads"], decoder["head_size"], decoder["num_hidden_layers"]) == (2, 8, 1)
    assert (config["model"]["vocab_size"], config["model"]["context_length"]) == (30, 64)
    assert "eos_token_id" not in config["model"]
    options = ort.SessionOptions()
    options.add_session_config_entry(FLOAT_PRODUCTS, decoder["session_options"][FLOAT_PRODUCTS])
    session = ort.InferenceSession(folder / decoder["filename"], options)
    given, returned = decoder["inputs"], decoder["outputs"]
    past = [given[f"past_{kind}_names"] % 0 for kind in ("key", "value")]
    present = [returned[f"present_{kind}_names"] % 0 for kind in ("key", "value")]
    cache = [torch.zeros(2, 2, 0, 8)] * 2
    for tokens in (ids(6, 1), ids(1, 2)):  # the prompt meets a cache of no token
        expected = sim.model(input_ids=tokens, past=cache)
        feed = {given["input_ids"]: tokens.numpy(), past[0]: cache[0].numpy(), past[1]: cache[1].numpy()}
        logits, *found = map(torch.from_numpy, session.run([returned["logits"], *present], feed))
        assert torch.allclose(logits, expected["logits"], atol=1e-5)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected["present"], strict=True))
        cache = found


@pytest.mark.slow
def test_a_graph_without_a_cache_is_refused(tmp_path):
    with pytest.raises(ExportError, match=r"takes input_ids and returns logits, present\.0, present\.1: make the"):
        simulation({"input_ids": ids(3)}).export(tmp_path / "out", formats="onnx_genai")
    assert not (tmp_path / "out").exists()
