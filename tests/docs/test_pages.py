"""What a page shows, runs: python blocks in one namespace a page, shell commands parse, configs and recipes load."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
import yaml
from typer.testing import CliRunner

import qtk
from qtk.auto.promise import Promise
from qtk.cli.app import app
from qtk.cli.recipe import load_recipe
from qtk.config.files import shipped_names
from qtk.config.load import load_config
from tests.docs import qat_programs
from tests.docs.llama_template import write_template
from tests.docs.pages import DOCS, PAGES, ROOT, blocks, languages, page
from tests.docs.short_digits import digits_of
from tests.zoo.prepared import slow_but

AROUND = {"qat.md": qat_programs.PROGRAMS}
"""Pages whose blocks are parts of programs: for each block what it takes from around it, and what it must have done."""

RUNNABLE = {"python", "sh", "yaml"}
COMMAND = typer.main.get_command(app)
README = (ROOT / "README.md").read_text(encoding="utf-8")
WITH_PYTHON = [name for name in PAGES if blocks(page(name), "python")]
LONG = {"accuracy.md", "bert.md", "cnn.md", "data.md", "detection.md", "language.md", "layerwise.md",
        "mixed_precision.md", "qat.md", "ranges.md", "recurrent.md", "transforms.md", "vit.md"}
"""Pages that take 3 seconds or more; other tests call what they call."""

OPTIONAL = re.compile(r"^(?:import|from) (transformers|torchvision)\b", re.MULTILINE)
"""Libraries without which the blocks that import them are left out."""

WITH_YAML = [name for name in PAGES if blocks(page(name), "yaml")]


def commands(text: str) -> Iterator[list[str]]:
    """The arguments of every ``qtk`` command in a page: in sh blocks, and in blocks that are indented."""
    for block in (*blocks(text, "sh"), *re.findall(r"^    qtk .*$", text, flags=re.MULTILINE)):
        for line in re.findall(r"^ *qtk (.*)$", block, flags=re.MULTILINE):
            yield shlex.split(line, comments=True)


CHEAP = [
    arguments for name in PAGES for arguments in commands(page(name))
    if arguments in (["--version"], ["targets"]) or arguments[:2] == ["inspect", "demo:digits_cnn"]
]


def names_in(block: str) -> tuple[set[str], set[str]]:
    """The names that a block defines, and the names that it reads and does not define."""
    defined, read = set(), set()
    for node in ast.walk(ast.parse(block)):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                read.add(name)
            case ast.Name(id=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                defined.add(name)
            case ast.alias(name=name, asname=other):
                defined.add(other or name.partition(".")[0])
    return defined, read - defined


def run_page(name: str, text: str) -> dict[str, object]:
    """Runs the python blocks of a page one after the other. Raises: what a block raises, with its place in the page."""
    names: dict[str, object] = {}
    around = AROUND.get(name)
    found = blocks(text, "python")
    assert around is None or len(around) == len(found)
    missing: set[str] = set()
    for number, block in enumerate(found):
        defined, read = names_in(block)
        if any(find_spec(library) is None for library in OPTIONAL.findall(block)) or read & missing:
            missing |= defined - names.keys()  # no such library: no block that reads these names
            continue
        missing -= defined
        if "model-f16.gguf" in block:
            write_template(names["llama"], "model-f16.gguf")
        before, after = around[number] if around else (dict, None)
        if around:
            names |= {"qtk": qtk, "torch": torch, **before()}
        lines = text[: text.index(block)].count("\n")
        exec(compile("\n" * lines + block, str(DOCS / name), "exec"), names)
        if after is not None:
            after(SimpleNamespace(**names))
    return names


def parse(arguments: list[str]) -> None:
    """Raises: what the command line raises for wrong usage."""
    with COMMAND.make_context("qtk", list(arguments)) as context:
        name, command, rest = COMMAND.resolve_command(context, [*context._protected_args, *context.args])
        command.make_context(name, rest, parent=context)


@pytest.mark.medium
@pytest.mark.parametrize("name", slow_but(WITH_PYTHON, *(name for name in WITH_PYTHON if name not in LONG)))
def test_the_python_blocks_of_a_page_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    for needed in ("sklearn", "onnxruntime"):
        pytest.importorskip(needed)
    monkeypatch.chdir(tmp_path)
    text = page(name)
    if pytestconfig.getoption("door") != "all":
        text = re.sub(r"\bsteps=\d{3,}\b", "steps=20", text)
    with contextlib.redirect_stdout(io.StringIO()), digits_of(pytestconfig):
        run_page(name, text)


@pytest.mark.slow
def test_the_page_on_accuracy_shows_what_its_first_block_prints() -> None:
    pytest.importorskip("sklearn")
    shown = re.search(r"It prints:\n\n((?:    .*\n)+)", page("accuracy.md"))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(blocks(page("accuracy.md"), "python")[0], "accuracy.md", "exec"), {})
    lines = [line.rstrip() for line in printed.getvalue().splitlines()]
    assert [re.sub(r"[\d.]+", "#", line[4:]) for line in shown[1].splitlines()] == [
        re.sub(r"[\d.]+", "#", line) for line in lines if line]


def test_the_page_on_accuracy_has_the_samples_that_a_promise_takes() -> None:
    rows = re.findall(r"^\| (0\.\d+)[^|]* \| ([\d,]+) \| about ([\d,]+) \|$", page("accuracy.md"), re.MULTILINE)
    scores, quantized = torch.ones(4000), torch.ones(4000)
    scores[:20], quantized[20:40] = 0, 0  # 1 % change, half each way
    assert len(rows) == 4
    for drop, best, typical in rows:
        promise = Promise(scores, float(drop), 0.95)
        for shown, needed in ((best, promise.samples_needed(None)), (typical, promise.samples_needed(quantized))):
            assert needed == pytest.approx(int(shown.replace(",", "")), rel=0.02)


@pytest.mark.parametrize("name", [*PAGES, "README.md"])
def test_every_command_of_a_page_parses(name: str) -> None:
    for arguments in commands(README if name == "README.md" else page(name)):
        if arguments[0] != "--version":
            parse(arguments)


@pytest.mark.parametrize("name", WITH_YAML)
def test_every_config_and_recipe_of_a_page_loads(name: str, tmp_path: Path) -> None:
    for block in blocks(page(name), "yaml"):
        content = yaml.safe_load(block)
        if "models" in content:
            path = tmp_path / "recipe.yaml"
            path.write_text(block, encoding="utf-8")
            assert load_recipe(path).models
        else:
            assert load_config(content).version == 1


@pytest.mark.parametrize("name", PAGES)
def test_every_block_has_a_language_that_is_run(name: str) -> None:
    assert set(languages(page(name))) <= RUNNABLE


@pytest.mark.medium
@pytest.mark.parametrize("arguments", CHEAP, ids=" ".join)
def test_cheap_commands_run(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output


def test_every_public_name_is_in_the_api_reference() -> None:
    text = page("api.md")
    documented = {*re.findall(r"^::: qtk\.[\w.]+\.(\w+)$", text, re.MULTILINE), *re.findall(r"`qtk\.(\w+)`", text)}
    assert set(qtk.__all__) - documented == set()
    for path in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE):
        module, _, name = path.rpartition(".")
        assert getattr(import_module(module), name) is getattr(qtk, name)


def test_what_the_methods_of_a_simulation_call_is_in_the_reference() -> None:
    named = re.findall(r"^::: ([\w.]+)$", page("methods.md"), re.MULTILINE)
    imports = re.findall(r"^ +from (qtk[\w.]+) import (.+)$", inspect.getsource(qtk.QuantSim), re.MULTILINE)
    internal = ("qtk.workflow.simulate", "qtk.workflow.store")  # which users do not call
    called = {f"{module}.{name}" for module, names in imports if module not in internal for name in names.split(", ")}
    assert called <= {*named}
    for path in named:
        module, _, name = path.rpartition(".")
        assert hasattr(import_module(module), name), path


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    shown = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )
    assert shown.returncode == 0, shown.stderr
    assert all((tmp_path / "site" / name.replace(".md", ".html")).is_file() for name in PAGES)
    assert "&gt;&gt;&gt;" in (tmp_path / "site" / "api.html").read_text(encoding="utf-8")


def test_the_list_of_targets_is_complete() -> None:
    first = page("targets.md").partition("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)` \| .* \| .* \| .* \|$", first, re.MULTILINE)
    assert sorted(listed) == shipped_names("targets")


def test_every_page_is_in_the_navigation() -> None:
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    entries = [entry for section in navigation for names in section.values() for entry in names]
    listed = [name for entry in entries for name in (entry.values() if isinstance(entry, dict) else [entry])]
    assert sorted(listed) == sorted([*PAGES, "reference-config.md", "reference-recipe.md"])


def anchors(path: Path) -> set[str]:
    """The names under which the headings of a page are linked to."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


GENERATED = ("reference-config.md", "reference-recipe.md")


@pytest.mark.parametrize("name", PAGES)
def test_every_anchor_of_a_page_is_a_heading(name: str) -> None:
    links = re.findall(r"\]\((?!https?:)([\w.-]*\.md)?#([^)]+)\)", page(name))
    assert [f"{link}#{anchor}" for link, anchor in links
            if link not in GENERATED and anchor not in anchors(DOCS / (link or name))] == []


@pytest.mark.parametrize("path", ["README.md", "docs/llms.txt"])
def test_every_link_leads_to_a_file(path: str) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)#?([^)]*)", (ROOT / path).read_text(encoding="utf-8"))
    assert links
    files = {link: (ROOT / path).parent / link for link, _ in links}
    assert [link for link, file in files.items() if not file.is_file()] == []
    assert [f"{link}#{anchor}" for link, anchor in links if anchor and anchor not in anchors(files[link])] == []


def test_a_planted_fault_is_found() -> None:
    with pytest.raises(NameError, match="missing"):
        run_page("planted.md", "# a page\n\n```python\nx = 1\n```\n\n```python\nx + missing\n```\n")
    with pytest.raises(Exception, match="no-such-option"):  # typer brings its own click, or does not
        parse(["inspect", "--no-such-option"])
    assert list(commands("```sh\nqtk targets  # all\n```\n    qtk inspect x\n")) == [["targets"], ["inspect", "x"]]
    assert languages("```python\nx\n```\n\n```\ny\n```\n") == ["python", ""]
    assert names_in("import a\nb = a.c(d)\n") == ({"a", "b"}, {"d"})


def test_a_recipe_leads_to_its_section() -> None:
    """And each section of recipes for language models is in the table."""
    text = page("language.md")
    recipes = re.findall(r"^### (.*)$", text.partition("## Recipes")[2].partition("### A folder, reloaded")[0], re.M)
    linked = re.findall(r"\(#([\w-]+)\) \|$", text.partition("## Recipes")[0], re.MULTILINE)
    assert {re.sub(r"[^\w\- ]", "", each).lower().replace(" ", "-") for each in recipes} <= set(linked)
    assert len(linked) == 8
