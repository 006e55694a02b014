"""kill -9 at random moments: nothing lost, nothing half-written, and nothing stale after the next run.

Every moment is that of a process of its own, forked from this one, so that it begins with the work at once.
"""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn
from tqdm import tqdm

import qtk
from qtk.cli.quantize import quantize
from qtk.cli.recipe import load_recipe
from qtk.export import encodings_json
from tests import fresh
from tests.fuzz.fuzzing import same, state

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
EXPORTED = {"encodings.json", "encodings_aimet_1.0.0.json", "encodings_aimet_2.0.0.json", ".written-by-qtk"}
MOMENTS = [pytest.param(5, id="few"), pytest.param(50, id="many", marks=pytest.mark.slow)]


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.ReLU()))).eval()


def sim(seed: int = 0, **options) -> qtk.QuantSim:
    made = qtk.QuantSim(net(seed), X, **options)
    made.compute_encodings([X], progress=False)
    return made


def leftovers(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob(".*") if path.name != ".written-by-qtk"] + [
        str(path.relative_to(folder)) for path in folder.rglob("*.part")]


def killed(work: Callable[[], object], after_s: float) -> bool:
    """Runs ``work`` in a process that is killed ``after_s`` later. Returns: whether it was still at work."""
    child = fresh.forked()
    if child == 0:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            work()
            code = 0
        finally:
            os._exit(code)
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the work itself failed"
    return os.WIFSIGNALED(status)


def test_a_process_that_is_killed_with_a_bar_on_the_screen_leaves_bars_to_others() -> None:
    shared, (ready, tell) = tqdm.get_lock(), os.pipe()
    child = fresh.forked()
    if child == 0:
        tqdm.get_lock().acquire()
        os.write(tell, b"1")
        time.sleep(60)
    assert os.read(ready, 1) == b"1"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert all(lock.acquire(timeout=0) for lock in shared.locks)
    shared.release()


def at_random_moments(count: int, work: Callable[[int], object], check: Callable[[int], None]) -> None:
    """Kills ``work(index)`` at ``count`` moments over its whole duration, and checks what is there after each.

    How long a run takes is found on the way: a moment that came too late makes those after it earlier.
    """
    work(-1)
    duration, moments, hits, index = timed(lambda: work(-1)), random.Random(count), 0, 0
    while hits < count and index < 4 * count:
        hit = killed(lambda index=index: work(index), moments.uniform(0, duration))
        check(index)
        duration *= 1.05 if hit else 0.9
        hits, index = hits + hit, index + 1
    assert hits >= count // 2, f"only {hits} of {index} runs were killed at work, which takes about {duration} s"


def timed(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


@pytest.mark.slow
@pytest.mark.parametrize("count", MOMENTS)
def test_a_save_is_the_old_or_the_new_simulation(count, tmp_path):
    sims = [sim(seed) for seed in (0, 1)]
    states, target = [state(each) for each in sims], tmp_path / "saved"

    def check(index: int) -> None:
        loaded = state(qtk.QuantSim.load(target, net(), X))
        assert any(same(loaded, each) for each in states)

    at_random_moments(count, lambda index: sims[index % 2].save(target, force=True), check)
    sims[0].save(target, force=True)
    assert same(state(qtk.QuantSim.load(target, net(), X)), states[0])
    assert leftovers(tmp_path) == []


@pytest.mark.medium
@pytest.mark.parametrize("count", MOMENTS)
def test_an_export_is_the_old_or_the_new_one(count, tmp_path):
    sims, target = [sim(seed) for seed in (0, 1)], tmp_path / "exported"

    def write(index: int) -> None:
        sims[index % 2].export(target, formats=["encodings"], force=True)

    def check(index: int) -> None:
        assert {path.name for path in target.iterdir()} == EXPORTED
        read = encodings_json.read(target / "encodings.json")
        assert any(
            read.keys() == each.keys() and all(read[name].equals(each[name]) for name in each)
            for each in (one.encodings() for one in sims)
        )

    at_random_moments(count, write, check)
    write(0)
    assert leftovers(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("count", MOMENTS)
def test_a_layer_wise_run_goes_on_and_ends_as_if_it_had_not_been_killed(count, tmp_path):
    whole = sim(weight_bits=4)
    qtk.apply_layerwise(whole, [X], ["seq_mse", "gptq"], progress=False)
    before, folder = state(sim(weight_bits=4)), tmp_path / "run"

    def work(index: int) -> None:
        made = sim(weight_bits=4)
        qtk.apply_layerwise(made, [X], ["seq_mse", "gptq"],
                            options=qtk.LayerwiseOptions(checkpoint_dir=folder / str(index)), progress=False)

    def check(index: int) -> None:
        made = sim(weight_bits=4)
        assert same(state(made), before)
        qtk.apply_layerwise(made, [X], ["seq_mse", "gptq"],
                            options=qtk.LayerwiseOptions(checkpoint_dir=folder / str(index)), progress=False)
        assert same(state(made), state(whole))
        assert leftovers(folder / str(index)) == []

    at_random_moments(count, work, check)


RECIPE_MODULE = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.ReLU()))).eval()

def batches():
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(16, 8, generator=generator), torch.arange(16) % 8) for _ in range(2)]
"""


def write_recipe(folder: Path) -> Path:
    (folder / "killed_recipe.py").write_text(RECIPE_MODULE)
    path = folder / "recipe.json"
    path.write_text(json.dumps({
        "models": [{"name": "net", "model": "killed_recipe:net"}],
        "data": {"calibration": "killed_recipe:batches", "evaluation": "killed_recipe:batches"},
        "settings": [{"name": name, "weight_bits": bits} for name, bits in (("w8", 8), ("w4", 4))],
        "exports": ["encodings"],
    }))
    return path


def check_settings(target: Path) -> None:
    """Checks that the results in ``target`` are whole settings, and a summary of them."""
    scores = json.loads((target / "summary.json").read_text())["models"]["net"]
    assert {"fp32", "w8"} <= scores.keys() <= {"fp32", "w8", "w4"}
    assert (target / "summary.txt").read_text().endswith("\n")
    folders = {path.name for path in (target / "net").iterdir() if not path.name.startswith(".")}
    assert scores.keys() - {"fp32"} <= folders <= {"w8", "w4"}
    for folder in folders:
        files = {path.name for path in (target / "net" / folder).iterdir() if not path.name.startswith(".report")}
        assert files in (EXPORTED, EXPORTED | {"report.html"})  # which is written behind the others
        encodings_json.read(target / "net" / folder / "encodings.json")


@pytest.mark.slow
@pytest.mark.parametrize("count", MOMENTS)
def test_a_recipe_leaves_whole_settings(count, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe, target = load_recipe(write_recipe(tmp_path)), tmp_path / "work" / "results"

    def work(index: int) -> None:
        quantize(recipe, target, force=True, console=Console(file=io.StringIO()))

    at_random_moments(count, work, lambda index: check_settings(target))
    work(0)
    assert leftovers(target.parent) == []


ROOT = Path(__file__).parents[2]


def run_command(recipe: Path, target: Path, *, killed_after_s: float | None = None) -> tuple[bool, float]:
    """Runs ``qtk quantize``, and kills it so long after it began with the model.

    Returns: whether it was killed at work; for how long it was at work.
    """
    command = [sys.executable, "-u", "-m", "qtk.cli.app", "quantize", str(recipe), "-o", str(target), "--force"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=recipe.parent, env=environment, stdout=subprocess.DEVNULL,
                          stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        assert first.startswith("net: capturing"), first + process.stderr.read()
        begin = time.perf_counter()
        try:
            process.communicate(timeout=killed_after_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        assert process.returncode in (0, -signal.SIGKILL)
        return process.returncode != 0, time.perf_counter() - begin


@pytest.mark.slow
def test_the_command_leaves_whole_settings(tmp_path):
    recipe, target = write_recipe(tmp_path), tmp_path / "work" / "results"
    _, duration = run_command(recipe, target)
    check_settings(target)
    moments, hits, runs = random.Random(0), 0, 0
    while hits < 6 and runs < 24:
        hit, _ = run_command(recipe, target, killed_after_s=moments.uniform(0, duration))
        check_settings(target)
        duration *= 1.05 if hit else 0.9
        hits, runs = hits + hit, runs + 1
    assert hits >= 3, f"only {hits} of {runs} runs were killed at work, which takes about {duration} s"
    assert run_command(recipe, target)[0] is False
    check_settings(target)
    assert leftovers(target.parent) == []
