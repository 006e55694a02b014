"""The GGUF file that llama.cpp's converter would make of a small Llama of transformers."""

from __future__ import annotations

import torch
from torch import nn


def write_template(model: nn.Module, path: str) -> None:
    """Writes tensors alone, named and arranged as llama.cpp has them: the rows of rotary pairs side by side."""
    import gguf

    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    heads = {"q_proj.weight": config.num_attention_heads, "k_proj.weight": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        for ending, count in heads.items():
            if name.endswith(ending):
                tensor = tensor.reshape(count, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        stored = tensor.to(torch.float16) if tensor.ndim == 2 else tensor
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), stored.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
