"""The programs in examples/ run as they stand, and training gains what they say it gains."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = {"qat_lightning": "lightning", "qat_trainer": "transformers"}
PROCESSES = {"qat_ddp": 2, "qat_fsdp": 2}
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_trains(name: str, tmp_path: Path) -> None:
    extra = EXTRAS.get(name)
    if extra is not None and importlib.util.find_spec(extra) is None:
        pytest.skip(f"needs {extra}")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES.get(name, 1)}"]
    shown = subprocess.run(
        [sys.executable, *(launcher if name in PROCESSES else []), str(ROOT / "examples" / f"{name}.py"), "--epochs=1"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert shown.returncode == 0, shown.stderr
    calibrated, trained = (
        float(re.findall(rf"{when}: ([\d.]+)%", shown.stdout)[-1]) for when in ("calibrated", "trained")
    )
    assert trained > calibrated + 2


def test_the_guide_lists_them() -> None:
    guide = (ROOT / "docs" / "qat.md").read_text(encoding="utf-8")
    assert sorted(set(re.findall(r"\(\.\./examples/(\w+)\.py\)", guide))) == EXAMPLES
