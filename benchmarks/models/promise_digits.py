"""How often ``qtk.quantize`` breaks the drop that it promises, and how dear the settings are that it finds.

    python benchmarks/models/promise_digits.py [--models digits_vit] [--settings w4a4] [--resplits 200]

Each setting of the search is simulated once for a model, and its scores on all digits but those that calibrate are
kept; each resplit draws the samples that ``evaluate`` sees and runs the search on the kept scores. The true drop of a
setting is that of all of these digits. *By means* is the search without a promise, on the same samples. Hindsight
picks the first setting whose true drop is small enough. A step is whatever is tried, a rung all steps of the ladder
that take the same time in the target's runtime, as the ladder estimates it: rungs are counted between the setting that
is found and hindsight's.
"""

from __future__ import annotations

import argparse
import bisect
import math
import time
import warnings
from types import SimpleNamespace

import torch
from torch import Tensor, nn

import qtk
from qtk.analysis.float_outputs import FloatOutputs
from qtk.auto.budget import Budget
from qtk.auto.choices import Choices
from qtk.auto.metric import Metric
from qtk.auto.promise import Promise
from qtk.auto.quantize import _Run
from qtk.auto.trial_builder import TrialBuilder
from qtk.auto.trial_log import TrialLog
from qtk.config.load import load_config
from qtk.demo.digits import load_digits_split
from qtk.demo.models import DEMO_MODELS, build
from qtk.report.account import Account
from qtk.report.table import Column, Table

CALIBRATED = 256
SETTINGS = {"w4a4": (4, 4), "w3a8": (3, 8), "w3a4": (3, 4)}


class Kept:
    """A builder of simulations that makes each once, with its error and its scores on all samples."""

    def __init__(self, name: str, setting: str, target: str) -> None:
        split = load_digits_split()
        batches = list(split.train_images[:CALIBRATED].split(32))
        self.images = torch.cat([split.train_images[CALIBRATED:], split.test_images])
        self.labels = torch.cat([split.train_labels[CALIBRATED:], split.test_labels])
        prepared = qtk.prepare_model(build(name), batches[0])
        self.weight_bits, self.activation_bits = SETTINGS[setting]
        self.builder = TrialBuilder(prepared, batches[0], load_config(target), self.weight_bits, self.activation_bits,
                                    batches[:-2])
        self.judge = FloatOutputs(prepared, batches[-2:], None)
        self.in_float = self.scores(prepared)
        self.known: dict[Choices, tuple[SimpleNamespace, float, Tensor]] = {}
        self.rankings: dict[Choices, list[str]] = {}
        self.dynamic = None

    def scores(self, model: nn.Module) -> Tensor:
        with torch.no_grad():
            found = torch.cat([model(part).argmax(1) for part in self.images.split(256)])
        return (found == self.labels).double()

    def simulation(self, choices: Choices) -> SimpleNamespace:
        if choices not in self.known:
            sim = self.builder.simulation(choices)
            model = nn.Module()
            model.choices = choices
            self.known[choices] = SimpleNamespace(model=model), self.judge.error(sim.model), self.scores(sim.model)
        return self.known[choices][0]

    def ranking(self, choices: Choices) -> list[str]:
        if choices not in self.rankings:
            self.rankings[choices] = self.builder.ranking(choices)
        return self.rankings[choices]

    def price(self, choices: Choices, sim: SimpleNamespace | None = None) -> float:
        return self.builder.price(choices)

    def error(self, model: nn.Module) -> float:
        return self.known[model.choices][1]

    def drop(self, choices: Choices, which: Tensor | slice = slice(None)) -> float:
        return float((self.in_float - self.known[choices][2])[which].mean())

    def run(self, max_drop: float, drawn: Tensor | slice, *, promises: bool) -> _Run:
        """The search, with the scores of the samples ``drawn``, or with their mean."""
        in_float = self.in_float[drawn]
        promise = Promise(in_float, max_drop, 0.95) if promises else None

        def evaluate(model: nn.Module) -> Tensor | float:
            scores = self.known[model.choices][2][drawn]
            return scores if promises else float(scores.mean())

        metric = Metric(evaluate, float(in_float.mean()), promise)
        account = Account("top1", max_drop, confidence=0.95 if promises else None)
        run = _Run(self, self, metric, account, time.monotonic(), math.inf, TrialLog(None, {}),
                   Budget({}, nn.Identity(), ()))
        run.finish(Choices("min_max"), progress=False)
        return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(DEMO_MODELS))
    parser.add_argument("--settings", nargs="+", default=["w4a4", "w3a8"])
    parser.add_argument("--drops", nargs="+", type=float, default=[0.02])
    parser.add_argument("--samples", type=int, default=800)
    parser.add_argument("--resplits", type=int, default=200)
    parser.add_argument("--target", default="default")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for name in arguments.models:
        for setting in arguments.settings:
            kept = Kept(name, setting, arguments.target)
            for max_drop in arguments.drops:
                rows.append(measured(kept, name, setting, max_drop, arguments))
                print(*rows[-1], flush=True)
    numbers = ("max_drop", "× float ms", "its drop", "promised", "broken", "broken by means", "at most one rung dearer",
               "at most one step later")
    headings = ("model", "setting", "max_drop", "hindsight", "× float ms", "its drop", "rungs, × float ms", "promised",
                "broken", "broken by means", "at most one rung dearer", "at most one step later")
    columns = tuple(Column(name, number=name in numbers) for name in headings)
    print(Table(f"qtk.quantize over {arguments.resplits} resplits, {arguments.samples} samples each", columns,
                tuple(rows)).text())


def rungs(kept: Kept) -> list[float]:
    """The run times over float of the ladder's rungs, all of it tried, the cheapest first."""
    whole = kept.run(-math.inf, slice(None), promises=False)
    return sorted({trial.run_time for trial in whole.account.trials if trial.run_time is not None})


def measured(kept: Kept, name: str, setting: str, max_drop: float, arguments: argparse.Namespace) -> tuple[str, ...]:
    hindsight = kept.run(max_drop, slice(None), promises=False)
    best = len(hindsight.account.trials) if hindsight.account.reached else math.inf
    prices = rungs(kept)
    limit = bisect.bisect_right(prices, kept.price(hindsight.best)) + 1  # one rung dearer
    promised = broken = by_means = near = soon = 0
    for seed in range(arguments.resplits):
        order = torch.randperm(len(kept.in_float), generator=torch.Generator().manual_seed(seed))
        run = kept.run(max_drop, order[:arguments.samples], promises=True)
        assert run.best is not None
        is_kept = kept.drop(run.best) <= max_drop
        promised += run.account.reached
        broken += run.account.reached and not is_kept
        near += run.account.reached and bisect.bisect_left(prices, kept.price(run.best)) < limit
        soon += run.account.reached and len(run.account.trials) <= best + 1
        plain = kept.run(max_drop, order[:arguments.samples], promises=False)
        by_means += plain.account.reached and not kept.drop(plain.best) <= max_drop
    count = arguments.resplits
    assert hindsight.best is not None
    shares = promised / count, broken / count, by_means / count, near / count, soon / count
    return (name, setting, f"{max_drop:.1%}", str(hindsight.best), f"{kept.price(hindsight.best):.2f}",
            f"{kept.drop(hindsight.best):.2%}", " ".join(f"{each:.2f}" for each in prices),
            *(f"{share:.1%}" for share in shares))


if __name__ == "__main__":
    main()
