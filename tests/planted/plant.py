"""Plants each fault in a copy of the checkout and runs the tests on it: ``make planted``, about an hour.

Tests of the fault's own room run first and stop at the first failure; the whole door runs for what survives. A fault
that ``make quick`` finds, ``make test`` finds: the tests of a door are among those of the next.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.planted.faults import FAULTS, Fault  # noqa: E402
from tests.rooms import places_of  # noqa: E402

DOORS = ("quick", "test")
"""The smallest first."""

HANGS_S = 1800


@dataclass(frozen=True)
class Outcome:
    """What a door says of a fault: the first test that fails, ``None`` if all pass."""

    fault: Fault
    door: str
    found_by: str | None


class Copy:
    """A copy of a checkout, with its compiled kernels, in which one fault at a time is planted."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        self.folder = folder
        listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=checkout,
                                check=True, capture_output=True, text=True).stdout
        for name in [*filter(None, listed.split("\0")), *(str(path) for path in _compiled(checkout))]:
            if (checkout / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(checkout / name, folder / name)

    def outcome(self, fault: Fault, doors: Sequence[str], *, whole: bool) -> Outcome:
        """The first of ``doors`` that finds the fault, run on the tests of its room or, ``whole``, on all tests."""
        path = self.folder / fault.file
        source = path.read_text(encoding="utf-8")
        try:
            path.write_text(fault.planted(source), encoding="utf-8")
            self._compile(fault)
            for door in doors:
                found_by = self._first_failure(door) if whole else self._first_failure_of_room(door, fault)
                if found_by is not None:
                    break
            tqdm.write(f"{fault}: {found_by or 'survives'}")
            return Outcome(fault, door, found_by)
        finally:
            path.write_text(source, encoding="utf-8")
            self._compile(fault)

    def _first_failure_of_room(self, door: str, fault: Fault) -> str | None:
        """Runs the tests of the file first: most faults end there."""
        path = Path(fault.file)
        mirror = Path("tests", *path.parts[1:-1], f"test_{path.name}")
        found_by = self._first_failure(door, str(mirror)) if (self.folder / mirror).is_file() else None
        return found_by or self._first_failure(door, *places_of(fault.room, self.folder))

    def _compile(self, fault: Fault) -> None:
        if fault.room == "csrc":
            subprocess.run([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=self.folder,
                           check=True, capture_output=True)

    def _first_failure(self, door: str, *places: str) -> str | None:
        command = [sys.executable, "-m", "pytest", "-x", "-rfE", "-p", "no:cacheprovider", "--door", door, *places]
        command += [] if places else ["-n", "2", "--dist", "loadscope"]
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        try:
            run = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True,
                                 timeout=HANGS_S, check=False)
        except subprocess.TimeoutExpired:
            return f"no end within {HANGS_S} s"
        if run.returncode in (0, 5):
            return None
        named = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
        return named[1] if named else f"exit status {run.returncode}: {run.stdout[-200:]}{run.stderr[-200:]}"


def _compiled(checkout: Path) -> list[Path]:
    return [path.relative_to(checkout) for path in (checkout / "qtk").glob("*.so")]


def outcomes(faults: Sequence[Fault], doors: Sequence[str], checkout: Path) -> list[Outcome]:
    """One outcome a fault: two faults at a time on the tests of their rooms, survivors one by one on all tests."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        copies = [Copy(checkout, Path(folder) / name) for name in ("first", "second")]
        shares = [pool.submit(lambda copy, share: [copy.outcome(fault, doors, whole=False) for fault in tqdm(share)],
                              copy, faults[index :: len(copies)]) for index, copy in enumerate(copies)]
        by_fault = {outcome.fault: outcome for share in shares for outcome in share.result()}
        for fault in tqdm(faults, desc="all tests"):
            known = by_fault[fault]
            smaller = list(doors) if known.found_by is None else list(doors[: doors.index(known.door)])
            if smaller and (of_all := copies[0].outcome(fault, smaller, whole=True)).found_by is not None:
                by_fault[fault] = of_all
    return [by_fault[fault] for fault in faults]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only the faults whose text holds one of these; default: all")
    parser.add_argument("--doors", nargs="+", choices=DOORS, default=list(DOORS))
    parser.add_argument("--checkout", type=Path, default=ROOT)
    parser.add_argument("--json", type=Path, help="file for the outcomes")
    arguments = parser.parse_args()
    faults = [fault for fault in FAULTS if not arguments.words or any(word in str(fault) for word in arguments.words)]
    found = outcomes(faults, arguments.doors, arguments.checkout)
    table = Table("file", "fault", "door", "first failure", title=f"{len(faults)} planted faults")
    for outcome in found:
        door = outcome.door if outcome.found_by is not None else "none"
        table.add_row(outcome.fault.file, outcome.fault.wrong, door, outcome.found_by or "")
    Console(width=200).print(table)
    for door in arguments.doors:
        doors = arguments.doors[: arguments.doors.index(door) + 1]
        count = sum(outcome.found_by is not None and outcome.door in doors for outcome in found)
        print(f"make {door} finds {count} of {len(faults)}")
    if arguments.json is not None:
        rows = [{"fault": str(each.fault), "door": each.door, "found_by": each.found_by} for each in found]
        arguments.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
