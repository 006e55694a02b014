"""Tiny language models of transformers, one of each family, with random weights and the arguments of a default call."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

VOCABULARY, WIDTH, LAYERS, HEADS, WINDOW, BATCH, TOKENS = 512, 128, 2, 4, 16, 2, 24
DECODER = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
           "num_key_value_heads": 2, "intermediate_size": 2 * WIDTH, "max_position_embeddings": 256,
           "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
RECURRENT = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "pad_token_id": 0,
             "bos_token_id": 1, "eos_token_id": None}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": WIDTH}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", DECODER),
    "qwen3": ("Qwen3", {**DECODER, "head_dim": 32}),
    "mistral": ("Mistral", {**DECODER, "sliding_window": WINDOW}),
    "gemma2": ("Gemma2", {**DECODER, "head_dim": 32, "sliding_window": WINDOW}),
    "gemma3": ("Gemma3", {**DECODER, "head_dim": 32, "sliding_window": WINDOW,
                          "layer_types": ["sliding_attention", "full_attention"]}),
    "phi": ("Phi", DECODER),
    "phi3": ("Phi3", DECODER),
    "gpt2": ("GPT2", {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 256,
                      "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}),
    "opt": ("OPT", {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "ffn_dim": 2 * WIDTH,
                    "num_attention_heads": HEADS, "word_embed_proj_dim": WIDTH, "max_position_embeddings": 256,
                    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}),
    "mixtral": ("Mixtral", {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": ("Qwen3Moe", {**DECODER, "head_dim": 32, **EXPERTS, "num_experts": 4}),
    "gpt-oss": ("GptOss", {**DECODER, "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
                           "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}),
    "deepseek-v3": ("DeepseekV3", {
        **DECODER, **EXPERTS, "num_key_value_heads": HEADS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16, "v_head_dim": 32}),
    "mamba": ("Mamba", {**RECURRENT, "state_size": 8}),
    "falcon mamba": ("FalconMamba", {**RECURRENT, "state_size": 8}),
    "mamba2": ("Mamba2", {**RECURRENT, "num_heads": 8, "head_dim": 32, "state_size": 16, "n_groups": 2,
                          "chunk_size": 32}),
    "bamba": ("Bamba", {**DECODER, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 32,
                        "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 32}),
    "jamba": ("Jamba", {**DECODER, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
                        "expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 8,
                        "mamba_dt_rank": 8, "use_mamba_kernels": False}),
    "qwen3-next": ("Qwen3Next", {
        **DECODER, **EXPERTS, "num_hidden_layers": 4, "head_dim": 32, "num_experts": 4, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "shared_expert_intermediate_size": WIDTH}),
    "granite hybrid": ("GraniteMoeHybrid", {
        **DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": WIDTH,
        "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16,
        "mamba_n_groups": 2, "mamba_chunk_size": 32}),
    "falcon": ("Falcon", {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": LAYERS,
                          "num_attention_heads": HEADS, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}),
}
"""Name → prefix of its classes, and what its config gets."""


def causal(name: str) -> tuple[nn.Module, dict[str, Any]]:
    transformers = import_module("transformers")
    prefix, settings = FAMILIES[name]
    text = "Text" if prefix == "Gemma3" else ""
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}{text}Config")(**settings)
    kind = getattr(transformers, f"{prefix}LMHeadModel" if prefix == "GPT2" else f"{prefix}ForCausalLM")
    return kind(config).eval(), {"input_ids": torch.randint(2, VOCABULARY, (BATCH, TOKENS))}


def t5() -> tuple[nn.Module, dict[str, Any]]:
    transformers = import_module("transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(vocab_size=VOCABULARY, d_model=WIDTH, d_kv=32, d_ff=2 * WIDTH, num_layers=LAYERS,
                                   num_heads=HEADS, decoder_start_token_id=0)
    ids = torch.randint(2, VOCABULARY, (BATCH, TOKENS))
    return transformers.T5ForConditionalGeneration(config).eval(), {"input_ids": ids, "decoder_input_ids": ids[:, :9]}


def bart() -> tuple[nn.Module, dict[str, Any]]:
    transformers = import_module("transformers")
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_ffn_dim=2 * WIDTH,
        decoder_ffn_dim=2 * WIDTH, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS,
        max_position_embeddings=256)
    ids = torch.randint(3, VOCABULARY, (BATCH, TOKENS))
    return transformers.BartForConditionalGeneration(config).eval(), {"input_ids": ids, "decoder_input_ids": ids[:, :9]}


def whisper() -> tuple[nn.Module, dict[str, Any]]:
    transformers = import_module("transformers")
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=LAYERS, decoder_layers=LAYERS, encoder_ffn_dim=2 * WIDTH,
        decoder_ffn_dim=2 * WIDTH, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, num_mel_bins=16,
        max_source_positions=32, max_target_positions=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1)
    ids = torch.randint(3, VOCABULARY, (BATCH, 9))
    return transformers.WhisperForConditionalGeneration(config).eval(), {
        "input_features": torch.randn(BATCH, 16, 64), "decoder_input_ids": ids}


def qwen2_vl() -> tuple[nn.Module, dict[str, Any]]:
    transformers = import_module("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen2VLConfig(
        text_config={**DECODER, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                    "mrope_section": [4, 6, 6]}},
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": WIDTH, "num_heads": 2, "mlp_ratio": 2,
                       "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2},
        image_token_id=3, video_token_id=4, vision_start_token_id=5, vision_end_token_id=6)
    grid = torch.tensor([[1, 4, 4], [1, 4, 4]])
    ids = torch.randint(10, VOCABULARY, (BATCH, TOKENS))
    ids[:, 3], ids[:, 4:8], ids[:, 8] = 5, 3, 6
    return transformers.Qwen2VLForConditionalGeneration(config).eval(), {
        "input_ids": ids, "pixel_values": torch.randn(32, 3 * 2 * 4 * 4), "image_grid_thw": grid,
        "mm_token_type_ids": (ids == 3).long()}


OTHERS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "t5": t5, "bart": bart, "whisper": whisper, "qwen2-vl": qwen2_vl}
"""Encoder-decoders, and a model that sees."""
