"""A small model with Llama's names, and the GGUF file that llama.cpp's converter would make of it."""

import numpy
import torch
from torch import nn

HEADS, WIDTH, WORDS = 4, 64, 50


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.v_proj = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.q_proj(x) * self.v_proj(x)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.input_layernorm = Attention(), nn.LayerNorm(WIDTH, bias=False)

    def forward(self, x):
        return x + self.self_attn(self.input_layernorm(x))


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList([Layer()])

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return x


class LlamaLike(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model, self.lm_head = Inner(), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids):
        return self.lm_head(self.model(ids))


def as_llama_cpp(rows):
    """The rows of queries as llama.cpp's converter arranges them: halves of rotary pairs side by side."""
    return rows.reshape(HEADS, 2, WIDTH // HEADS // 2, -1).transpose(1, 2).reshape(WIDTH, -1)


def write_template(model, path):
    import gguf

    state = model.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_string("general.name", "small")
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    tensors = {
        "token_embd.weight": state["model.embed_tokens.weight"], "output.weight": state["lm_head.weight"],
        "blk.0.attn_q.weight": as_llama_cpp(state["model.layers.0.self_attn.q_proj.weight"]),
        "blk.0.attn_v.weight": state["model.layers.0.self_attn.v_proj.weight"],
    }
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy().astype(numpy.float16))
    writer.add_tensor("blk.0.attn_norm.weight", state["model.layers.0.input_layernorm.weight"].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
