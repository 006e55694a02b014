"""What the command does with a folder is handed on to ``quantize_checkpoint``."""

from pathlib import Path

import pytest
from rich.console import Console

from qtk.cli import folders
from qtk.errors import ConfigError


def run(monkeypatch, **changed):
    given = {"config": None, "methods": (), "data": None, "num_batches": None, "force": False, "progress": False}
    calls = []
    monkeypatch.setattr(folders, "quantize_checkpoint", lambda *args, **options: calls.append((args, options)))
    folders.quantize_folder("a/llama", None, Console(quiet=True), **(given | changed))
    return calls[0]


def test_the_target_is_named_after_folder_and_config(monkeypatch):
    (source, target), options = run(monkeypatch)
    assert (source, target) == (Path("a/llama"), Path("a/llama-vllm_w4a16"))
    assert options["config"] == "vllm_w4a16"
    assert options["methods"] == []
    assert options["data"] is None


@pytest.mark.medium
def test_data_can_be_read_again_without_labels(monkeypatch):
    _, options = run(monkeypatch, methods=("gptq",), data="qtk.demo.digits:calibration_batches", num_batches=2)
    assert [len(list(options["data"])) for _ in range(2)] == [2, 2]
    with pytest.raises(ConfigError, match="--method needs --data"):
        run(monkeypatch, data="qtk.demo.digits:calibration_batches")
