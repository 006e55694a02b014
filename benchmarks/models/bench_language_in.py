"""Language models of transformers by their default call: the capture, a cache out and in, and greedy tokens.

Tiny models with random weights, one of each family. ``s`` is the CPU time of ``prepare_model`` by the default call,
which returns a cache, in seconds; ``by no cache`` its ratio to that with ``use_cache=False``, medians in turns;
``nodes`` those of the graph. ``out`` is the largest difference from the original, the returned cache included, ``in``
the same of a call that takes the cache of the call before; both at the sizes of the example and at others. Tokens: 64
by ``generate``, with a cache and without, of the int4 weights in the user's own class, and of the graphs of
``vllm_w8a8``, whose logits are float, and of ``default``, whose logits have 8 bits; a yes is that both are the same 64.
Speed is the tokens/s of the simulation by that of the float model, medians in turns.

    pip install "qtk[hf]"
    python benchmarks/models/bench_language_in.py [--only llama t5] [--no-tokens | --tokens-only]
"""

from __future__ import annotations

import argparse
import copy
import inspect
import statistics
import time
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from language_families import FAMILIES, OTHERS, VOCABULARY, causal
from torch import nn

import qtk
from qtk.torch_private import pytree

NEW, TURNS = 64, 3
LENGTHS = (5, 7, 30, 40, 130)
"""Numbers of tokens other than the example's; with a cache, nets with a convolution over time take 4 and more."""


def largest_difference(a: Any, b: Any) -> float:
    """Over all leaves, tensors or numbers; infinite if the classes or shapes differ."""
    (mine, structure), (theirs, other) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    if str(structure) != str(other) or len(mine) != len(theirs):
        return float("inf")
    worst = 0.0
    for x, y in zip(mine, theirs, strict=True):
        x, y = torch.as_tensor(x), torch.as_tensor(y)
        if x.shape != y.shape or x.dtype != y.dtype:
            return float("inf")
        worst = max(worst, (x.double() - y.double()).abs().max().item() if x.numel() else 0.0)
    return worst


def cache_name(model: nn.Module) -> str:
    names = inspect.signature(model.forward).parameters
    return next(name for name in ("cache", "past_key_values", "cache_params") if name in names)


def timed(model: nn.Module, examples: list[dict[str, Any]]) -> tuple[Any, list[float]]:
    """The first example prepared, and the medians of the times of all, in turns."""
    elapsed: list[list[float]] = [[] for _ in examples]
    qtk.prepare_model(model, examples[0], dynamic_shapes="all")  # what is done once a process is no part of it
    for _ in range(TURNS):
        for example, each in reversed([*zip(examples, elapsed, strict=True)]):
            started = time.process_time()
            prepared = qtk.prepare_model(model, example, dynamic_shapes="all")
            each.append(time.process_time() - started)
    return prepared, [statistics.median(each) for each in elapsed]


def next_call(model: nn.Module, example: dict[str, Any], new: int, *, whole: bool = True) -> dict[str, Any]:
    """The call that takes the cache of a call with ``example``."""
    name = cache_name(model)
    own = {} if whole else {name: import_module("transformers").DynamicCache()}
    with torch.no_grad():
        first = model(**copy.deepcopy(example), **own)
    ids = torch.randint(10, VOCABULARY, (example[next(iter(example))].shape[0], new))
    call: dict[str, Any] = {name: first[name]}
    if "decoder_input_ids" not in example:
        return {"input_ids": ids[:len(example["input_ids"])], **call}
    hidden = import_module("transformers").modeling_outputs.BaseModelOutput(first.encoder_last_hidden_state)
    return {"encoder_outputs": hidden, "decoder_input_ids": ids, **call}


def difference(model: nn.Module, prepared: nn.Module, call: dict[str, Any]) -> float:
    with torch.no_grad():
        return largest_difference(model(**copy.deepcopy(call)), prepared(**copy.deepcopy(call)))


def others(example: dict[str, Any]) -> list[dict[str, Any]]:
    """The same call with other numbers of tokens, where these may be any."""
    if [*example] != ["input_ids"]:
        return []
    return [{"input_ids": torch.randint(10, VOCABULARY, (3, length))} for length in LENGTHS]


def capture_row(model: nn.Module, example: dict[str, Any]) -> Iterator[str]:
    prepared, (default_s, plain_s) = timed(model, [example, {**example, "use_cache": False}])
    yield prepared.report.rung
    yield f"{default_s:.1f}"
    yield f"{default_s / plain_s:.2f}"
    yield f"{len(prepared.graph.nodes)}" if prepared.report.rung == "export" else "–"
    yield f"{max(difference(model, prepared, call) for call in (example, *others(example))):.1e}"
    calls = [next_call(model, example, tokens) for tokens in (5, 1)]
    prepared = qtk.prepare_model(model, example, variants=calls, dynamic_shapes="all")
    yield f"{prepared.report.rung} {max(difference(model, prepared, call) for call in calls):.1e}"


def tokens_per_s(models: list[nn.Module], ids: torch.Tensor, **options: Any) -> list[float]:
    """Medians, in turns."""
    elapsed: list[list[float]] = [[] for _ in models]
    for _ in range(TURNS):
        for model, each in zip(models, elapsed, strict=True):
            started = time.process_time()
            model.generate(ids, max_new_tokens=NEW, do_sample=False, **options)
            each.append(time.process_time() - started)
    return [ids.shape[0] * NEW / statistics.median(each) for each in elapsed]


def token_cells(model: nn.Module, example: dict[str, Any]) -> Iterator[str]:
    ids = example["input_ids"]
    sim = qtk.QuantSim(model, example, config="weight_only_int4", dynamic_shapes="all")
    sim.compute_encodings(None)
    own = sim.to_original()
    yield "yes" if agree(own, own, ids) else "no"
    quick, float_speed = tokens_per_s([own, model], ids)
    yield f"{quick / float_speed:.2f}"
    name, empty = cache_name(model), import_module("transformers").DynamicCache
    is_full = any("sliding" in each for each in getattr(model.config, "layer_types", None) or ()) or (
        getattr(model.config, "sliding_window", None) is not None)
    first = {**example, name: empty()} if is_full else example
    step = next_call(model, example, 5, whole=not is_full)
    one = next_call(model, example, 1, whole=not is_full)
    for config in ("vllm_w8a8", "default"):
        sim = qtk.QuantSim(
            model, step, variants=[first, one], dynamic_shapes="all", states={name: name}, config=config)
        sim.compute_encodings([first, step, one], progress=False)
        thin = sim.to_original()
        yield "yes" if agree(thin, thin, ids) else "no"
        quick, float_speed = tokens_per_s([thin, model], ids)
        yield f"{quick / float_speed:.2f}"


def agree(a: nn.Module, b: nn.Module, ids: torch.Tensor) -> bool:
    options = {"max_new_tokens": NEW, "do_sample": False}
    return torch.equal(a.generate(ids, use_cache=True, **options), b.generate(ids, use_cache=False, **options))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[*FAMILIES, *OTHERS], help="names of families")
    parser.add_argument("--no-tokens", action="store_true", help="the capture alone")
    parser.add_argument("--tokens-only", action="store_true", help="the tokens alone")
    arguments = parser.parse_args()
    if find_spec("transformers") is None:
        raise SystemExit('needs transformers; run: pip install "qtk[hf]"')
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    import_module("transformers").logging.set_verbosity_error()
    print("| family | rung | s | by no cache | nodes | out | in | int4 = | speed | w8a8 = | speed | 8 bits = | speed |")
    print("|---" * 13 + "|")
    for name in arguments.only:
        model, example = causal(name) if name in FAMILIES else OTHERS[name]()
        cells = [name]
        try:
            if not arguments.tokens_only:
                cells += capture_row(model, example)
            if name in FAMILIES and not arguments.no_tokens:
                cells += token_cells(model, example)
        except Exception as error:  # one family is not all
            cells.append(f"{type(error).__name__}: {error}".replace("\n", " ")[:300])
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
