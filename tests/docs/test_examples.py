"""The programs in examples/ run as they stand; on all digits, training gains what they say it gains."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests import fresh
from tests.docs.short_digits import digits_of, short_digits

pytest.importorskip("sklearn")

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = {"qat_lightning": "lightning", "qat_trainer": "transformers"}
PROCESSES = {"qat_ddp": 2, "qat_fsdp": 2}
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


def skip_without_extra(name: str) -> None:
    extra = EXTRAS.get(name)
    if extra is not None and importlib.util.find_spec(extra) is None:
        pytest.skip(f"needs {extra}")


def file_of(name: str) -> str:
    return str(ROOT / "examples" / f"{name}.py")


def epochs(short: bool) -> list[str]:
    """The arguments of a program: on few digits for a short time, on all of them as a reader runs it."""
    return ["--epochs=1"] if short else []


def on_a_rank(name: str, *, short: bool) -> None:
    """What each process of an example with several runs."""
    sys.argv = [name, *epochs(short)]
    if short:
        with short_digits():
            runpy.run_path(file_of(name), run_name="__main__")
    else:
        runpy.run_path(file_of(name), run_name="__main__")


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("name", EXAMPLES)
def test_it_trains(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config,
    capfd: pytest.CaptureFixture[str],
) -> None:
    skip_without_extra(name)
    monkeypatch.chdir(tmp_path)
    is_short = pytestconfig.getoption("door") != "all"
    if name in PROCESSES:
        printed = fresh.run_ranks(on_a_rank, PROCESSES[name], name, short=is_short)[0].stdout
    else:
        monkeypatch.setattr(sys, "argv", [name, *epochs(is_short)])
        with digits_of(pytestconfig):
            runpy.run_path(file_of(name), run_name="__main__")
        printed = capfd.readouterr().out
    calibrated, trained = (float(re.findall(rf"{when}: ([\d.]+)%", printed)[-1]) for when in ("calibrated", "trained"))
    assert is_short or 100 - trained < (100 - calibrated) / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PROCESSES))
def test_it_trains_under_torchrun(name: str, tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES[name]}"]
    subprocess.run([sys.executable, *launcher, file_of(name), "--epochs=1"], cwd=tmp_path, check=True,
                   env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})


def test_the_guide_lists_them() -> None:
    guide = (ROOT / "docs" / "qat.md").read_text(encoding="utf-8")
    assert sorted(set(re.findall(r"\(\.\./examples/(\w+)\.py\)", guide))) == EXAMPLES
