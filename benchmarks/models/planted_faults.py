"""Which site broke the model: how often a planted fault comes first.

    python benchmarks/models/planted_faults.py [MODEL …] [--each 6] [--bits 8]

Faults, one at a time in a calibrated simulation: the range of an activation × 0.05; a weight twice as large as its
encoding was made for (the encoding is halved, so that the float model stays); the weights of a layer at 2 bits; and,
which costs one bit and does no harm, the scale of a weight × 2. ``own``: the planted site is the first of
``sim.compare``; ``accumulated``: the first by accumulated error; ``sensitivity``: among the first two of
``sim.sensitivity``. Of the demo's models also Spearman's correlation of estimated and measured sensitivity over all
sites, 1,024 images.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

import qtk
from qtk.demo.digits import load_digits_split
from qtk.demo.models import DEMO_MODELS, build


class SmallBert(nn.Module):
    """An encoder of tokens, normed behind its sums, with random weights of the spread of a trained one."""

    def __init__(self, width: int = 64, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(200, width), nn.Embedding(32, width)
        self.norm = nn.LayerNorm(width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, activation="gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.words(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.layers(self.norm(embedded))[:, 0])


def model_and_data(name: str) -> tuple[nn.Module, list[Tensor]]:
    """The model and two batches."""
    torch.manual_seed(0)
    if name in DEMO_MODELS:
        return build(name), list(load_digits_split().train_images[:128].split(64))
    if name == "small_bert":
        return SmallBert().eval(), [torch.randint(0, 200, (16, 24)) for _ in range(2)]
    import timm

    made = (timm.create_model("resnet18", zero_init_last=False) if name == "resnet18"
            else timm.create_model("vit_tiny_patch16_224"))
    return made.eval(), [torch.randn(4, 3, 224, 224) for _ in range(2)]


MODELS = (*DEMO_MODELS, "vit_tiny", "resnet18", "small_bert")


@contextmanager
def rescaled(sim: qtk.QuantSim, site: str, factor: float) -> Iterator[None]:
    """The range of ``site`` × ``factor``."""
    quantizer, encoding = sim.quantizers[site], sim.encodings()[site]
    quantizer.load_encoding(replace(encoding, scale=encoding.scale * factor))
    try:
        yield
    finally:
        quantizer.load_encoding(encoding)


def faults(
    prepared: nn.Module, data: list[Tensor], bits: int, each: int
) -> Iterator[tuple[str, set[str], qtk.QuantSim]]:
    """Kind, sites and simulation of every fault; the simulation is to be looked at before the next."""
    sim = qtk.QuantSim(prepared, data[0], weight_bits=bits, activation_bits=bits)
    sim.compute_encodings(data, progress=False)
    draw, parameters = random.Random(0), dict(sim.model.named_parameters())
    healthy = {error.site: error for error in sim.compare(data, progress=False)}
    quantized = [site.name for site, plan in sim.plan.items() if plan.leader is None and plan.factors is None]
    weights = [site for site in quantized if site in parameters and parameters[site].ndim > 1]
    values = [site for site in quantized if site not in parameters and healthy[site].range_filled > 0]
    for kind, sites, factor in (("range × 0.05", values, 0.05), ("weight × 2", weights, 0.5),
                                ("weight scale × 2", weights, 2.0)):
        for site in draw.sample(sites, min(each, len(sites))):
            with rescaled(sim, site, factor):
                yield kind, {site}, sim
    for site in draw.sample(layers := [name for name in weights if "." in name], min(max(each // 2, 1), len(layers))):
        config = {"version": 1, "extends": "default",
                  "rules": [{"match": {"path": site.rpartition(".")[0]}, "weight": {"bits": 2}}]}
        low = qtk.QuantSim(prepared, data[0], weight_bits=bits, activation_bits=bits, config=config)
        low.compute_encodings(data, progress=False)
        yield "2 bits", {name for name, each in low.quantizers.items() if each.spec.dtype.bits == 2}, low


def rank_correlation(name: str, bits: int) -> float:
    """Spearman's correlation of the increase of the loss by each site, estimated and measured."""
    data = list(load_digits_split().train_images[:1024].split(64))
    sim = qtk.QuantSim(build(name), data[0], weight_bits=bits, activation_bits=bits)
    sim.compute_encodings(data, progress=False)
    rows = sim.sensitivity(data, top=len(sim.quantizers), progress=False)
    pairs = torch.tensor([(row.estimated_increase, row.increase) for row in rows], dtype=torch.float64)
    return float(torch.corrcoef(pairs.argsort(0).argsort(0).double().T)[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--each", type=int, default=6)
    parser.add_argument("--bits", type=int, default=8)
    arguments = parser.parse_args()
    total: Counter[str] = Counter()
    for name in arguments.models:
        model, data = model_and_data(name)
        counts: Counter[str] = Counter()
        for kind, sites, sim in faults(qtk.prepare_model(model, data[0]), data, arguments.bits, arguments.each):
            errors = sim.compare(data, progress=False)
            rank = min(index for index, error in enumerate(errors) if error.site in sites)
            accumulated = min(errors, key=lambda error: error.sqnr_db).site in sites
            first_two = {row.name for row in sim.sensitivity(data, top=0, progress=False)[:2]}
            counts.update({f"{kind} planted": 1, f"{kind} own": rank == 0, f"{kind} accumulated": accumulated,
                           f"{kind} sensitivity": bool(first_two & sites)})
            if not first_two & sites:
                print(f"  {name} {kind} {sorted(sites)[0]}: not among {sorted(first_two)} by sensitivity")
            if rank:
                print(f"  {name} {kind} {errors[rank].site}: {rank + 1} by own error, behind {errors.top(rank)!r}, "
                      f"itself {errors[rank].own_sqnr_db:.1f} dB")
        print(f"{name}: {dict(counts)}", flush=True)
        total.update(counts)
        if name in DEMO_MODELS:
            print(f"{name}: Spearman {rank_correlation(name, arguments.bits):.3f}", flush=True)
    print(f"all: {dict(total)}")


if __name__ == "__main__":
    main()
