"""The driver of the benchmarks on GPUs, as far as it needs none: its tables, its message, what it starts."""

from __future__ import annotations

import ast
import csv
import importlib.util
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


driver = load(ROOT / "benchmarks/measure_gpu.py")
LAUNCH = next(section for section in driver.SECTIONS if section.name == "launch")
ROWS = [{"commit": "abc", "torch": "2.15", "way": "qtk", "median_us": "12.3456", "times_copy": "1.5"},
        {"commit": "abc", "torch": "2.15", "way": "copy_", "median_us": "12345.6", "times_copy": ""}]


def test_a_table_shows_three_digits_and_dashes():
    assert driver.markdown(ROWS, LAUNCH.columns).splitlines() == [
        "| way | µs | × copy_ |", "|---|---|---|", "| qtk | 12.3 | 1.5 |", "| copy_ | 12,346 | – |"]


def test_a_table_has_a_column_for_every_way():
    rows = [{"action": action, "kind": "float32", "granularity": scales, "way": "qtk", "median_us": us,
             "times_copy": "1.234"}
            for action, scales, us in [("forward", "tensor", "12.34"), ("forward", "block", "1500"),
                                       ("backward", "block", "")]]
    assert driver.markdown(*driver.spread(rows, driver.SECTIONS[0])).splitlines() == [
        "| dtype | scales | forward, qtk | backward, qtk |", "|---|---|---|---|",
        "| float32 | tensor | 12.3 (1.23) | – |", "| float32 | block | 1,500 (1.23) | – (1.23) |"]


def test_a_table_goes_between_its_marks_alone():
    text = "a\n<!-- gpu:x -->\nold\n<!-- /gpu:x -->\nb\n<!-- gpu:y -->\nkept\n<!-- /gpu:y -->\n"
    once = driver.with_table(text, "x", "new")
    assert once == text.replace("old", "new")
    assert driver.with_table(once, "x", "new") == once
    for broken in ("", text.replace("<!-- /gpu:x -->", ""), text.replace("gpu:y", "gpu:x")):
        with pytest.raises(SystemExit, match="once each"):
            driver.with_table(broken, "x", "new")


def test_the_results_have_the_marks_of_every_section(tmp_path):
    results, into = tmp_path / "RESULTS.md", tmp_path / "gpu.md"
    results.write_text(driver.RESULTS.read_text(encoding="utf-8"), encoding="utf-8")
    tables = {section.name: f"table of {section.name}" for section in driver.SECTIONS}
    driver.write(tables, results, into)
    for table in tables.values():
        assert table in results.read_text(encoding="utf-8")
        assert table in into.read_text(encoding="utf-8")
    with pytest.raises(SystemExit):
        driver.write({"nobody": "x"}, results, into)
    assert "nobody" not in into.read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_fails_and_writes_nothing():
    before = driver.RESULTS.read_bytes(), driver.TABLES.exists()
    run = subprocess.run([sys.executable, ROOT / "benchmarks/measure_gpu.py"], capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr.startswith("no GPU")
    assert (driver.RESULTS.read_bytes(), driver.TABLES.exists()) == before


def table_of(text, name):
    return text.partition(f"<!-- gpu:{name} -->")[2].partition(f"<!-- /gpu:{name} -->")[0]


def test_what_failed_is_named_and_the_rest_written(monkeypatch, tmp_path, capsys):
    results = tmp_path / "RESULTS.md"
    as_it_was = driver.RESULTS.read_text(encoding="utf-8")
    results.write_text(as_it_was, encoding="utf-8")
    monkeypatch.setattr(driver, "RESULTS", results)
    monkeypatch.setattr(driver, "TABLES", tmp_path / "gpu.md")
    monkeypatch.setattr(driver, "device_name", lambda: "a GPU")
    monkeypatch.setattr(driver, "measured", lambda section, **_: ROWS if section is LAUNCH else "broken")
    assert driver.main(["--only", "launch", "kernels"]) == 1
    assert "kernels: no table: broken" in capsys.readouterr().err
    written = results.read_text(encoding="utf-8")
    assert "| 12.3 (1.5) | 12,346 (–) |" in written
    with (tmp_path / "launch_gpu.csv").open(newline="", encoding="utf-8") as file:
        assert list(csv.DictReader(file)) == ROWS
    assert not (tmp_path / "kernels_gpu.csv").exists()
    others = [section.name for section in driver.SECTIONS if section is not LAUNCH]
    assert [table_of(written, name) for name in others] == [table_of(as_it_was, name) for name in others]
    assert driver.main(["--only", "launch"]) == 0
    before = results.read_bytes()
    assert driver.main(["--only", "launch", "--quick"]) == 0
    assert results.read_bytes() == before


@pytest.mark.medium
def test_figures_are_read_from_the_process(monkeypatch, tmp_path):
    def command(code):
        return lambda self, into, *, quick: [sys.executable, "-c", code.format(into=str(into))]

    monkeypatch.setattr(driver.Section, "command", command("open({into!r}, 'w').write('way,us\\nqtk,3\\n')"))
    assert driver.measured(LAUNCH, quick=False, timeout_s=60) == [{"way": "qtk", "us": "3"}]
    monkeypatch.setattr(driver.Section, "command", command("raise SystemExit(3) # {into}"))
    assert "exit status 3" in driver.measured(LAUNCH, quick=False, timeout_s=60)
    monkeypatch.setattr(driver.Section, "command", command("import time; time.sleep(60) # {into}"))
    assert "not done" in driver.measured(LAUNCH, quick=False, timeout_s=0.5)


@pytest.mark.parametrize("section", driver.SECTIONS, ids=lambda section: section.name)
def test_every_script_takes_its_options(section):
    source = (ROOT / "benchmarks" / section.script).read_text(encoding="utf-8")
    shared = (ROOT / "benchmarks/turns.py").read_text(encoding="utf-8")
    ast.parse(source)
    for option in (*section.options, *section.quick, section.csv):
        if option.startswith("--"):
            assert f'"{option}"' in source or ("turns import" in source and f'"{option}"' in shared), option
    assert "cuda" in driver.described(section, [dict.fromkeys(section.columns, "1")], "a GPU", date(2026, 1, 1))


@pytest.mark.slow  # test_every_script_takes_its_options is its quick one
@pytest.mark.parametrize("section", [section for section in driver.SECTIONS if section.name != "kernels"],
                         ids=lambda section: section.name)
def test_every_script_runs_on_the_cpu_and_has_the_columns(section, tmp_path):
    pytest.importorskip("timm")
    into = tmp_path / "figures.csv"
    command = section.command(into, quick=True)
    command[command.index("cuda")] = "cpu"
    command += ["--eager"] if section.name == "simulation" else []
    command = ["float32" if part == "bfloat16" else part for part in command]
    subprocess.run(command, check=True, capture_output=True)
    with into.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert driver.markdown(rows, section.columns).count("\n") == len(rows) + 1
