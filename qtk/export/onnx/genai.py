"""A folder that onnxruntime-genai loads: a decoder whose cache has the names of that runtime, and its config.

The runtime calls the file with all tokens of a prompt and a cache of no token, then with a token and the cache that
the call before returned. What else the model needs, positions and masks, its graph computes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import onnx
from torch import Tensor, fx

from qtk.calls.inputs import is_free
from qtk.errors import ExportError
from qtk.export.file_signature import file_signature
from qtk.export.onnx.file_states import STATES

CONFIG_FILE = "genai_config.json"
KINDS = "key", "value"
CACHE_AXES = 4
"""Axes of keys and values: samples, heads, tokens, size of a head."""

LIKE = "llama"
"""The runtime's name of decoders with keys and values of each layer, and nothing else, as inputs and outputs."""


def export(graph: fx.GraphModule, config: object, file: Path, settings: Mapping[str, str]) -> None:
    """Gives the cache in an ONNX file of ``graph`` the runtime's names, and writes the config beside it.

    Args:
        graph: a graph that takes a cache.
        config: of the model, as transformers has it: sizes and special tokens.
        file: the ONNX file; changed.
        settings: ONNX Runtime's, of a session that computes what was simulated.

    Raises: ExportError if the graph takes other tensors than token ids, a mask, positions and a cache whose batch and
        length are free, or returns other ones than logits and that cache.
    """
    past, present = _cache(graph)
    layers = range(len(past) // 2)
    names = {name: f"past_key_values.{layer}.{kind}"
             for name, (layer, kind) in zip(past, ((each, kind) for each in layers for kind in KINDS), strict=True)}
    names |= {name: f"present.{layer}.{kind}"
              for name, (layer, kind) in zip(present, ((each, kind) for each in layers for kind in KINDS), strict=True)}
    model = onnx.load(file, load_external_data=False)
    _rename(model.graph, names)
    for entry in model.metadata_props:
        if entry.key == STATES:
            entry.value = json.dumps({names.get(name, name): {**state, "output": names.get(state["output"])}
                                      for name, state in json.loads(entry.value).items()})
    onnx.save(model, file)
    _, heads, _, size = next(iter(past.values())).shape
    described = _config(config, file.name, [each for each in _inputs(graph) if each not in past], len(layers),
                        int(heads), int(size), settings)
    (file.parent / CONFIG_FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def _inputs(graph: fx.GraphModule) -> dict[str, Tensor]:
    """Name in the file → example value of each tensor that the graph takes."""
    nodes = graph.graph.find_nodes(op="placeholder")
    return {str(node.target): node.meta["val"] for node in nodes if isinstance(node.meta.get("val"), Tensor)}


def _cache(graph: fx.GraphModule) -> tuple[dict[str, Tensor], list[str]]:
    """Name → example value of the keys and values that the graph takes, and the names of the returned ones."""
    outputs = {name: node.meta["val"] for name, node in file_signature(graph).outputs.items()}
    past = {name: value for name, value in _inputs(graph).items() if value.is_floating_point()}
    present = [name for name in outputs if name != "logits"]
    fits = past and len(past) == len(present) and len(past) % 2 == 0 and "logits" in outputs and all(
        value.ndim == CACHE_AXES and is_free(value.shape[0]) and is_free(value.shape[2])
        for value in (*past.values(), *(outputs[name] for name in present)))
    if not fits:
        raise ExportError(
            "onnxruntime-genai runs decoders that take the keys and values of each layer, and return them and logits; "
            f"this graph takes {', '.join(_inputs(graph))} and returns {', '.join(outputs)}: make the simulation from "
            'a call with a cache of some tokens, QuantSim(model, {"input_ids": ids, "cache": cache}, '
            'variants=[prompt], dynamic_shapes="all")')
    return past, present


def _rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Renames tensors of a graph, also where graphs inside read them."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        value.name = names.get(value.name, value.name)
    for node in graph.node:
        for tensors in (node.input, node.output):
            tensors[:] = [names.get(name, name) for name in tensors]
        for inside in _inner_graphs(node):
            _rename(inside, names)


def _inner_graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    for attribute in node.attribute:
        yield from (attribute.g,) if attribute.HasField("g") else attribute.graphs


def _config(
    config: object, file_name: str, inputs: list[str], layers: int, heads: int, size: int,
    settings: Mapping[str, str],
) -> dict[str, object]:
    """Returns what the runtime reads, its documented fields."""

    def known(*names: str) -> object:
        return next((value for name in names if (value := getattr(config, name, None)) is not None), None)

    length = known("max_position_embeddings", "n_positions")
    tokens = {f"{name}_token_id": known(f"{name}_token_id") for name in ("bos", "eos", "pad")}
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": [], **settings},
        "filename": file_name, "head_size": size, "hidden_size": known("hidden_size", "n_embd"),
        "num_attention_heads": known("num_attention_heads", "n_head"), "num_hidden_layers": layers,
        "num_key_value_heads": heads,
        "inputs": {**{name: name for name in inputs}, **{
            f"past_{kind}_names": f"past_key_values.%d.{kind}" for kind in KINDS}},
        "outputs": {"logits": "logits", **{f"present_{kind}_names": f"present.%d.{kind}" for kind in KINDS}},
    }
    model = {"type": LIKE, "context_length": length, "vocab_size": known("vocab_size"), **tokens, "decoder": decoder}
    search = {"do_sample": False, "max_length": length, "past_present_share_buffer": False}
    return {"model": {name: value for name, value in model.items() if value is not None}, "search": search}
