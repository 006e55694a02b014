"""A small decoder with a quantized KV cache: 64 decode steps against float, its file against the simulation, and bytes.

The decoder, 3 layers of width 64 with 4 heads, is trained for a minute on the characters of ``docs/``. SQNR is that of
the logits, by decode step, the mean over four batches of sequences, each a prompt of 8 characters and 64 steps; float
and simulation carry their own caches. Once the cache alone is quantized, once all of the model as the target says. The
loop of the file is compared with that of the simulation, and timed, with states in float and as codes. No time is
printed of a file whose loop, optimizations off, is below ``LEAST_DB`` from the simulation. fp8 has no codes in files.
The simulation's own loop is timed in PyTorch, by the CPU time of one thread, all settings in turns, with the cache in
float too.

The last table is of a Llama of bytes, 2 layers of width 96 with 4 heads of queries and 2 of keys, trained for a minute
on the sources of Python's standard library, with ``kv_cache`` of the config, in one call and by a cache that is
carried from call to call: perplexity and Kullback-Leibler divergence from float on files that were held out, the
largest difference of the logits between one call and a cache in pieces, and of how many prompts the greedy tokens with
a cache are those without. It needs transformers (``pip install 'qtk[hf]'``).

    python benchmarks/models/bench_kv_cache.py [--only-language | --without-language]
"""

from __future__ import annotations

import argparse
import math
import statistics
import sysconfig
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import qtk
from qtk.config.load import load_config
from qtk.runtimes.session import create_session

VOCABULARY, WIDTH, HEADS, LAYERS, LONGEST, PROMPT, STEPS, BATCH = 64, 64, 4, 3, 128, 8, 64, 4
AXIS = {"granularity": "per_channel", "axis": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "uint8": {"bits": 8}, "int8": {"bits": 8, "symmetric": True},
    "int8 per head": {"bits": 8, "symmetric": True, **AXIS},
    "fp8_e4m3": {"dtype": "fp8_e4m3"}, "fp8_e4m3 per head": {"dtype": "fp8_e4m3", **AXIS},
}
TURNS = 5
"""Times that each loop of a simulation is run."""

SHOWN = 1, 16, 32, 48, 64
"""Decode steps whose SQNR is printed."""

LEAST_DB = 30.0

LENGTH, HELD_OUT, CALIBRATION, PROMPTS, NEW = 96, 64, 16, 4, 64
"""Of the language model: bytes of a sample, samples for the perplexity and for calibration, prompts, greedy tokens."""

KV_CACHES = [(dtype, granularity) for granularity in ("per_head", "per_tensor", "per_token")
             for dtype in ("int8", "fp8_e4m3")]

Cache = list[tuple[Tensor, Tensor]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor], mask: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y = self.norm(x)
        q, k, v = (each(y).view(*y.shape[:2], HEADS, -1).transpose(1, 2) for each in (self.q, self.k, self.v))
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, mask)
        x = x + self.o(attended.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.last(x)), (k, v)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, past: Cache) -> tuple[Tensor, Cache]:
        new, old = ids.shape[1], past[0][0].shape[2]
        at = torch.arange(new, device=ids.device) + old
        mask = torch.arange(new + old, device=ids.device) <= at[:, None]
        x, present = self.tokens(ids) + self.positions(at), []
        for block, each in zip(self.blocks, past, strict=True):
            x, returned = block(x, each, mask)
            present.append(returned)
        return self.head(self.norm(x)), present


def cache(batch: int, length: int) -> Cache:
    return [(torch.zeros(batch, HEADS, length, WIDTH // HEADS),) * 2 for _ in range(LAYERS)]


def characters() -> Tensor:
    """The docs, each character as its rank among the most frequent; 0 for the others."""
    pages = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    ranks = {each: rank + 1 for rank, each in enumerate(sorted({*text}, key=text.count)[::-1][:VOCABULARY - 1])}
    return torch.tensor([ranks.get(each, 0) for each in text])


def trained(data: Tensor, steps: int) -> Decoder:
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    for _ in range(steps):
        x = torch.stack([data[at:at + 97] for at in torch.randint(0, len(data) - 97, (16,))])
        loss = nn.functional.cross_entropy(model(x[:, :-1], cache(16, 0))[0].flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    print(f"trained {steps} steps, cross entropy {loss.item():.2f}")
    return model.eval()


def sequences(data: Tensor, seed: int, count: int) -> qtk.Sequences:
    generator, batches = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        first = torch.randint(0, len(data) - PROMPT - STEPS, (BATCH,), generator=generator)
        x = torch.stack([data[at:at + PROMPT + STEPS] for at in first])
        batches += [(each, cache(BATCH, 0)) for each in (x[:, :PROMPT], *x[:, PROMPT:].split(1, 1))]
    return qtk.Sequences(batches, reset=1 + STEPS)


def simulation(
    model: Decoder, setting: dict[str, Any] | str, data: qtk.Sequences, target: str | None
) -> qtk.QuantSim:
    """Of all of the model as a target says; ``None``: of its cache alone. The setting ``float`` leaves the cache so."""
    rules: list[Any] = [{"match": {"op": "concat"}, "output": setting}]
    base: dict[str, Any] = {"version": 1, "rules": [{"match": {"path": "*"}, "output": "float"}]}
    if target is not None:
        base = load_config(target).model_dump(mode="json", exclude_none=True)
    example = torch.randint(0, VOCABULARY, (2, 3)), cache(2, 5)
    sim = qtk.QuantSim(model, example, dynamic_shapes="all", states={"past": 1},
                       config={**base, "rules": [*base["rules"], *rules]},
                       **({"weight_bits": None} if target is None else {}))
    sim.compute_encodings(data, progress=False)
    return sim


def by_step(sim: qtk.QuantSim, data: qtk.Sequences) -> str:
    """SQNR in dB of the logits against float at the steps ``SHOWN``, and the mean of all, as cells of a table."""
    found = torch.tensor(sim.drift(data, progress=False).sqnr_db).view(-1, 1 + STEPS).mean(0)[1:]
    return " | ".join(f"{float(each):.1f}" for each in (*(found[step - 1] for step in SHOWN), found.mean()))


def run(sim: qtk.QuantSim, file: Path, data: qtk.Sequences, *, optimized: bool) -> tuple[float, int, str]:
    """SQNR in dB of the logits of the file's loop against the simulation's, bytes of its cache, milliseconds a step.

    These are the median and the least.
    """
    session, _ = create_session(file, optimized=optimized, threads=1)
    types = {each.name: each.type for each in session.get_inputs()[1:]}
    kinds = {"tensor(float)": np.float32, "tensor(uint8)": np.uint8, "tensor(int8)": np.int8}
    states = {name: np.zeros((BATCH, HEADS, 0, WIDTH // HEADS), kinds[kind]) for name, kind in types.items()}
    past, noise, power, seconds = cache(BATCH, 0), 0.0, 0.0, []
    for ids, _ in list(data)[:1 + STEPS]:  # type: ignore[misc]
        start = time.perf_counter()
        logits, *after = session.run(None, {"ids": ids.numpy(), **states})
        seconds.append(time.perf_counter() - start)
        states = dict(zip(states, after, strict=True))
        with torch.no_grad():
            expected, past = sim.model(ids, past)
        noise += float((torch.from_numpy(logits) - expected).square().sum())
        power += float(expected.square().sum())
    exact = 10 * math.log10(power / noise) if noise else math.inf
    elapsed_ms = f"{1e3 * statistics.median(seconds):.2f}, {1e3 * min(seconds):.2f}"
    return exact, sum(each.nbytes for each in states.values()), elapsed_ms


def in_torch(models: dict[str, nn.Module], data: qtk.Sequences) -> dict[str, str]:
    """CPU milliseconds of a decode step of each model, a cache carried from step to step: the median, and the least."""
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(TURNS):
        for name, model in models.items():
            past = cache(BATCH, 0)
            for step, (ids, _) in enumerate(list(data)[:1 + STEPS]):  # type: ignore[misc]
                start = time.process_time()
                with torch.no_grad():
                    _, past = model(ids, past)
                if step:
                    seconds[name].append(time.process_time() - start)
    return {name: f"{1e3 * statistics.median(found):.2f}, {1e3 * min(found):.2f}" for name, found in seconds.items()}


def sources() -> tuple[Tensor, Tensor]:
    """The bytes of the standard library, of nine files in ten, and of the others."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
             for path in sorted(folder.glob("*.py")) if path.stat().st_size]
    return torch.cat([each for index, each in enumerate(files) if index % 10]).long(), torch.cat(files[::10]).long()


def samples(data: Tensor, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([data[at:at + LENGTH] for at in torch.randint(0, len(data) - LENGTH, (count,),
                                                                     generator=generator)])


def trained_language(data: Tensor, steps: int) -> Any:
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=256, hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=None, eos_token_id=None))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    for step in range(steps):
        x = samples(data, 12, step)
        loss = model(input_ids=x, labels=x, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    print(f"language model trained {steps} steps, cross entropy {loss.item():.3f}", flush=True)
    return model.eval()


def language_simulation(
    model: Any, ids: Tensor, calibration: Tensor, target: str | None, kv_cache: dict[str, str] | None
) -> qtk.QuantSim:
    """Of the cache alone, or beside what a target quantizes; a graph for a prompt and one that takes a cache."""
    import transformers

    with torch.no_grad():
        given = model(input_ids=ids[:, :9], cache=transformers.DynamicCache()).cache
    first = {"input_ids": ids, "cache": transformers.DynamicCache()}
    base: dict[str, Any] = {"version": 1, "rules": [{"match": {"path": "*"}, "output": "float"}]}
    base = base if target is None else {"version": 1, "extends": target}
    sim = qtk.QuantSim(model, first, variants=[{"input_ids": ids[:, 9:12], "cache": given}], dynamic_shapes="all",
                       config={**base, "kv_cache": kv_cache}, **({"weight_bits": None} if target is None else {}))
    sim.compute_encodings([{"input_ids": calibration, "cache": transformers.DynamicCache()}], progress=False)
    return sim


def in_pieces(model: Any, ids: Tensor) -> Tensor:
    """Logits by a cache that is carried on: a prompt, a piece, then byte by byte."""
    import transformers

    cache, logits = transformers.DynamicCache(), []
    with torch.no_grad():
        for piece in (ids[:, :20], ids[:, 20:30], *ids[:, 30:40].split(1, 1)):
            output = model(input_ids=piece, cache=cache)
            cache = output.cache
            logits.append(output.logits)
    return torch.cat(logits, 1)


def language(steps: int) -> None:
    """Prints the table of the language model."""
    import transformers

    seen, unseen = sources()
    model = trained_language(seen, steps)
    ids, calibration = samples(seen, 2, 1)[:, :16], samples(seen, CALIBRATION, 3)
    held_out = samples(unseen, HELD_OUT, 2)
    batches = [{"input_ids": each, "cache": transformers.DynamicCache()} for each in held_out.split(16)]
    before = qtk.perplexity(model, [{"input_ids": each["input_ids"]} for each in batches], progress=False)
    print(f"\nfloat perplexity {before:.4f}\n\n| weights | kv_cache | perplexity | - that without kv_cache | "
          "KL, 1e-6 | one call - pieces | greedy equal |\n|---|---|---|---|---|---|---|", flush=True)
    for target in (None, "vllm_w8a8"):
        base = before
        for kv_cache in KV_CACHES if target is None else (None, ("int8", "per_head"), ("fp8_e4m3", "per_tensor")):
            setting = None if kv_cache is None else dict(zip(("dtype", "granularity"), kv_cache, strict=True))
            sim = language_simulation(model, ids, calibration, target, setting)
            found = qtk.perplexity(sim, batches, progress=False)
            base = found if kv_cache is None else base
            divergence = qtk.divergence(sim, batches, progress=False).mean
            with torch.no_grad():
                whole = sim.model(input_ids=held_out[:4, :40], cache=transformers.DynamicCache()).logits
            apart = (whole - in_pieces(sim.model, held_out[:4, :40])).abs().max().item()
            print(f"| {target or 'float'} | {' '.join(kv_cache or ('float',))} | {found:.4f} | {found - base:+.4f} | "
                  f"{divergence * 1e6:.0f} | {apart:.1e} | {greedy(sim, held_out[:PROMPTS, :20])} of {PROMPTS} |",
                  flush=True)


def greedy(sim: qtk.QuantSim, prompts: Tensor) -> int:
    """Of how many prompts the greedy tokens with a cache are those without."""
    simulated = sim.to_original()
    arguments = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    tokens = [simulated.generate(prompts, use_cache=use_cache, **arguments) for use_cache in (True, False)]
    return int((tokens[0] == tokens[1]).all(1).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--training-steps", type=int, default=600)
    parser.add_argument("--language-steps", type=int, default=400)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--only-language", action="store_true")
    chosen.add_argument("--without-language", action="store_true")
    parser.add_argument("--target", default="onnxruntime")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if not arguments.only_language:
        states_in_loops(arguments)
    if not arguments.without_language:
        language(arguments.language_steps)


def states_in_loops(arguments: argparse.Namespace) -> None:
    """Prints the tables of the decoder of characters."""
    data = characters()
    model = trained(data, arguments.training_steps)
    calibration, held_out = sequences(data, 1, 4), sequences(data, 2, 4)
    steps, files = [], ["|---|---|---|---|---|"]
    unquantized = simulation(model, "float", calibration, arguments.target)
    loops: dict[str, nn.Module] = {"the float model": model, "float cache": unquantized.model}
    files.append(f"| float, states in float | {measured(unquantized, held_out, codes=False)} |")
    for name, setting in ((name, SETTINGS[name]) for name in arguments.settings):
        alone, sim = (simulation(model, setting, calibration, target) for target in (None, arguments.target))
        loops |= {f"{name} cache": sim.model, f"{name} cache alone": alone.model}
        steps.append(f"| {name} | {by_step(alone, held_out)} | {by_step(sim, held_out)} |")
        for codes in (False,) if "dtype" in setting else (False, True):
            states = "as codes" if codes else "in float"
            files.append(f"| {name}, states {states} | {measured(sim, held_out, codes)} |")
            print(files[-1], flush=True)
    shown = " | ".join(map(str, SHOWN))
    print(f"\n| cache | alone, dB at step {shown} | mean | all by {arguments.target}, {shown} | mean |")
    print("|---" * (3 + 2 * len(SHOWN)) + "|", *steps, sep="\n")
    print("\n| cache | file, optimizations off, dB | on | bytes at step 64 | ms a step, at best |", *files, sep="\n")
    print(f"\n| simulated by {arguments.target} in PyTorch | CPU ms a step, at best |\n|---|---|")
    print(*(f"| {name} | {found} |" for name, found in in_torch(loops, held_out).items()), sep="\n", flush=True)


def measured(sim: qtk.QuantSim, data: qtk.Sequences, codes: bool) -> str:
    """The cells of one file."""
    with tempfile.TemporaryDirectory() as folder:
        sim.export(Path(folder, "out"), formats="onnx", state_codes=codes, check=False)
        file = Path(folder, "out", "model.onnx")
        off, size_bytes, _ = run(sim, file, data, optimized=False)
        on, _, ms = run(sim, file, data, optimized=True)
    return f"{off:.1f} | {on:.1f} | {size_bytes:,} | {ms if off >= LEAST_DB else '–'}"


if __name__ == "__main__":
    main()
