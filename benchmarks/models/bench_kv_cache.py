"""A small decoder with a quantized KV cache: 64 decode steps against float, its file against the simulation, and bytes.

The decoder, 3 layers of width 64 with 4 heads, is trained for a minute on the characters of ``docs/``. SQNR is that of
the logits, the mean over the calls of two batches of sequences, each a prompt of 8 characters and 64 steps; float and
simulation carry their own caches. Once the cache alone is quantized, once all of the model as the target says. The loop
of the file is compared with that of the simulation, and timed, with states in float and as codes.

    python benchmarks/models/bench_kv_cache.py
"""

from __future__ import annotations

import argparse
import math
import statistics
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


def simulation(model: Decoder, setting: dict[str, Any], data: qtk.Sequences, target: str | None) -> qtk.QuantSim:
    """Of all of the model as a target says; ``None``: of its cache alone."""
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


def run(sim: qtk.QuantSim, file: Path, data: qtk.Sequences, *, optimized: bool) -> tuple[float, int, float]:
    """SQNR in dB of the logits of the file's loop against the simulation's, bytes of its cache, milliseconds a step."""
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
    return exact, sum(each.nbytes for each in states.values()), 1e3 * statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--training-steps", type=int, default=600)
    parser.add_argument("--target", default="onnxruntime")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    data = characters()
    model, calibration, held_out = trained(data, arguments.training_steps), sequences(data, 1, 4), sequences(data, 2, 2)
    for name, setting in SETTINGS.items():
        alone, sim = (simulation(model, setting, calibration, target) for target in (None, arguments.target))
        found = [statistics.fmean(each.drift(held_out, progress=False).sqnr_db) for each in (alone, sim)]
        print(f"{name:<18} cache alone {found[0]:.1f} dB, {arguments.target} {found[1]:.1f} dB", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            for codes in (False, True) if "dtype" not in setting else (False,):
                sim.export(Path(folder, str(codes)), formats="onnx", state_codes=codes, check=False)
                for optimized in (False, True) if "dtype" not in setting else (False,):
                    file = Path(folder, str(codes), "model.onnx")
                    db, size_bytes, ms = run(sim, file, held_out, optimized=optimized)
                    kind, switched = "codes" if codes else "float", "on " if optimized else "off"
                    print(f"  states as {kind}, optimizations {switched}: "
                          f"{db:6.1f} dB against the simulation, cache {size_bytes:,} bytes, {ms:.2f} ms a step",
                          flush=True)


if __name__ == "__main__":
    main()
