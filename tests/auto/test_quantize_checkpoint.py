"""Folders quantized file to file: the bytes of a model in memory, runs that are killed, and the command."""

import hashlib
import os
import signal
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import qtk
from qtk.cli.app import app
from qtk.errors import ConfigError, ExportError
from qtk.nn.mapped_weights import is_mapped
from tests import fresh

pytest.importorskip("compressed_tensors")

X = torch.randn(2, 64, 16, generator=torch.Generator().manual_seed(1)) @ torch.randn(16, 128)
NAMES = {"int4": "vllm_w4a16", "int8": {"version": 1, "extends": "vllm_w4a16", "rules": [
    {"match": {"op": "linear"}, "weight": {"dtype": "int8", "granularity": "per_channel"}}]}}


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128, bias=False), nn.LayerNorm(128))


@pytest.fixture
def source(tmp_path):
    torch.manual_seed(0)
    folder = tmp_path / "source"
    folder.mkdir()
    save_file(Net().bfloat16().state_dict(), folder / "model.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def build():
    return Net().bfloat16()


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.medium
@pytest.mark.parametrize(("config", "methods"), [("int4", ()), ("int8", ()), ("int4", "gptq")])
def test_bytes_are_those_of_a_model_in_memory(source, tmp_path, config, methods):
    x, options = X.bfloat16(), qtk.LayerwiseOptions(holdout=0)
    model = build()
    with torch.no_grad():
        model.load_state_dict(load_file(source / "model.safetensors"))
    sim = qtk.QuantSim(model.eval(), x[0], config=NAMES[config], in_place=True)
    sim.compute_encodings(None)
    qtk.round_scales(sim)
    if methods:
        qtk.apply_gptq(sim, x, progress=False, options=options)
    sim.export(tmp_path / "memory", formats="compressed_tensors")
    report = qtk.quantize_checkpoint(source, tmp_path / "out", model=build, example_inputs=x[0], config=NAMES[config],
                                     methods=methods, data=x if methods else None, progress=False, options=options)
    assert not any(is_mapped(each) for each in model.parameters())
    assert (report is None) == (not methods)
    expected, found = digests(tmp_path / "memory"), digests(tmp_path / "out")
    assert found.pop("tokenizer.json")
    assert found == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["memory", "out", "source"]


def test_what_is_missing_or_there_already_is_an_error(source, tmp_path):
    def run(**options):
        qtk.quantize_checkpoint(source, tmp_path / "out", model=build, example_inputs=X[0].bfloat16(), progress=False,
                                **options)

    with pytest.raises(ConfigError, match="methods gptq need data"):
        run(methods="gptq")
    with pytest.raises(ConfigError, match="the config quantizes activations"):
        run(config="vllm_w8a8")
    (tmp_path / "out").mkdir()
    with pytest.raises(ExportError, match="exists already"):
        run()
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_and_writes_the_same_bytes(source, tmp_path):
    def run(target):
        qtk.quantize_checkpoint(source, tmp_path / target, model=build, example_inputs=X[0].bfloat16(), methods="gptq",
                                data=X.bfloat16(), progress=False)

    started = time.monotonic()
    run("whole")
    lasts_s = time.monotonic() - started
    kills = 0
    for turn in range(20):
        child = fresh.forked()
        if child == 0:
            run("out")
            os._exit(0)
        time.sleep(lasts_s * turn / 20)
        os.kill(child, signal.SIGKILL)
        kills += os.waitpid(child, 0)[1] != 0
        assert not (tmp_path / "out").exists() or digests(tmp_path / "out") == digests(tmp_path / "whole")
        if (tmp_path / "out").exists():
            break
    if not (tmp_path / "out").exists():
        run("out")
    assert kills
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source", "whole"]


def test_the_command_says_what_goes_together(source):
    def error(*arguments):
        result = CliRunner().invoke(app, ["quantize", *map(str, arguments)])
        assert result.exit_code == 1
        return result.stderr

    assert "--method needs --data" in error(f"hf:{source}", "--method", "gptq")
    assert "no folder with a config.json" in error(f"hf:{source}")
    assert "go with hf:FOLDER" in error("--config", "vllm_w4a16")


@pytest.mark.slow
def test_the_command_quantizes_a_folder_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=1,
                                      num_attention_heads=2, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "llama")
    result = CliRunner().invoke(app, ["quantize", f"hf:{tmp_path / 'llama'}", "-o", str(tmp_path / "out")])
    assert result.exit_code == 0
    assert f"written to {tmp_path / 'out'}" in result.stdout.replace("\n", "")
    ids = {"input_ids": torch.arange(8)[None], "use_cache": False}
    sim = qtk.QuantSim(model, ids, config="vllm_w4a16")
    sim.compute_encodings(None)
    qtk.round_scales(sim)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(loaded(**ids).logits, sim.model(**ids).logits)
