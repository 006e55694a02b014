"""A run that was killed goes on, and ends where it would have ended."""

import errno
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import qtk
from qtk.errors import CalibrationError
from qtk.layerwise import run
from tests import fresh

METHODS = ["seq_mse", "gptq", "bias_correction"]


def problem(seed=0, shape=(32, 16)):
    torch.manual_seed(seed)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.ReLU()))).eval()
    data = [torch.randn(shape) for _ in range(3)]
    sim = qtk.QuantSim(model, data[0], weight_bits=4)
    sim.compute_encodings(data, progress=False)
    return sim, data


def state(sim):
    return {name: value.clone() for name, value in sim.model.state_dict().items()}


def masked_problem():
    """Layers of tokens, of which some only fill up."""
    mask = torch.arange(4) < torch.tensor([4, 2, 3, 1, 4, 4, 2, 3])[:, None]
    return *problem(shape=(8, 4, 16)), lambda batch: mask


HOLDOUTS = {
    "samples": {"holdout": 0.4}, "groups": {"holdout": 0.4, "groups": ["a", "b", "a"]}, "none": {"holdout": 0.0},
    "samples of tokens": {"holdout": 0.4}, "second call": {"start": "float"}, "going on": {"start": "present"},
}


def judged(how, **options):
    """A simulation after a run with held-out data, and its report."""
    sim, data, valid = masked_problem() if how == "samples of tokens" else (*problem(), None)
    if "start" in HOLDOUTS[how]:
        qtk.apply_gptq(sim, data, damping=0.1, progress=False)
    options = qtk.LayerwiseOptions(**HOLDOUTS[how], **options)
    return sim, qtk.apply_layerwise(sim, data, METHODS, valid=valid, progress=False, options=options)


def stopping_after_two_layers(directory, how=None):
    """A process that is slow after its second layer, so that it can be killed there."""
    real = run.compute_update

    def compute_update(layer, *rest):
        if len(list(Path(directory).glob("*.safetensors"))) == 2:
            print("two", flush=True)
            time.sleep(60)
        return real(layer, *rest)

    run.compute_update = compute_update
    if how is not None:
        judged(how, checkpoint_dir=directory)
        return
    sim, data = problem()
    qtk.apply_layerwise(sim, data, METHODS, options=qtk.LayerwiseOptions(checkpoint_dir=directory), progress=False)


def killed_after_two_layers(folder, how=None):
    process = fresh.Running(stopping_after_two_layers, (str(folder), how))
    process.wait_for("two\n")
    process.kill()
    assert process.wait().returncode == -signal.SIGKILL


@pytest.mark.sample(2)
@pytest.mark.medium
@pytest.mark.parametrize("how", [
    pytest.param(how, marks=[pytest.mark.slow] if how in ("groups", "none", "going on") else []) for how in HOLDOUTS
])
def test_killed_and_resumed_with_held_out_data_is_bit_equal(tmp_path, how, monkeypatch):
    folder = tmp_path / "run"
    killed_after_two_layers(folder, how)
    whole, expected = judged(how)
    resumed, report = judged(how, checkpoint_dir=folder)
    own, other = state(resumed), state(whole)
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)
    assert report == expected
    assert all((layer.held_out is None) == (how == "none") for layer in report.layers)
    if how != "none" and "start" not in HOLDOUTS[how]:
        monkeypatch.setitem(HOLDOUTS, how, {**HOLDOUTS[how], "holdout": 0.7})
        with pytest.raises(CalibrationError, match="another run: not the same holdout"):
            judged(how, checkpoint_dir=folder)


@pytest.mark.medium
def test_killed_and_resumed_is_bit_equal_to_uninterrupted(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    killed_after_two_layers(folder)
    assert sorted(file.name for file in folder.iterdir()) == ["0000.safetensors", "0001.safetensors", "run.json"]

    real, made = run.compute_update, []
    monkeypatch.setattr(
        run, "compute_update", lambda layer, *rest: (made.append(layer.name), real(layer, *rest))[1])
    whole, data = problem()
    expected = qtk.apply_layerwise(whole, data, METHODS, progress=False)
    assert made == ["0.weight", "2.weight", "4.weight", "6.weight"]
    made.clear()
    resumed, data = problem()
    report = qtk.apply_layerwise(resumed, data, METHODS, options=qtk.LayerwiseOptions(checkpoint_dir=folder),
                                 progress=False)
    assert made == ["4.weight", "6.weight"]
    own, other = state(resumed), state(whole)
    assert own.keys() == other.keys()
    assert all(torch.equal(own[name], other[name]) for name in own)
    assert report == expected
    again, data = problem()
    qtk.apply_layerwise(again, data, METHODS, options=qtk.LayerwiseOptions(checkpoint_dir=folder), progress=False)
    assert made == ["4.weight", "6.weight"]
    assert all(torch.equal(value, other[name]) for name, value in state(again).items())


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize(
    ("change", "named"),
    [("methods", "methods"), ("inputs", "inputs"), ("data", "data"), ("model", "weights and encodings"),
     ("sites", "layers")],
)
def test_the_directory_of_another_run_is_refused(tmp_path, change, named):
    sim, data = problem()
    qtk.apply_layerwise(sim, data, ["seq_mse"], options=qtk.LayerwiseOptions(checkpoint_dir=tmp_path), progress=False)
    other, _ = problem(seed=1 if change == "model" else 0)
    before = state(other)
    with pytest.raises(CalibrationError, match=f"another run: not the same {named}"):
        qtk.apply_layerwise(
            other, data[:2] if change == "data" else data,
            ["seq_mse(num_candidates=7)" if change == "methods" else "seq_mse"],
            options=qtk.LayerwiseOptions(inputs="symqt" if change == "inputs" else "asym", checkpoint_dir=tmp_path),
            sites=["0.weight", "2.weight"] if change == "sites" else None, progress=False,
        )
    assert all(torch.equal(before[name], value) for name, value in state(other).items())


@pytest.mark.medium
def test_damaged_files_are_named(tmp_path):
    sim, data = problem()
    qtk.apply_layerwise(sim, data, ["seq_mse"], options=qtk.LayerwiseOptions(checkpoint_dir=tmp_path), progress=False)
    (tmp_path / "0001.safetensors").write_bytes(b"nonsense")
    with pytest.raises(CalibrationError, match=r"0001\.safetensors.*delete it to do 2.weight again"):
        qtk.apply_layerwise(problem()[0], data, ["seq_mse"], options=qtk.LayerwiseOptions(checkpoint_dir=tmp_path),
                            progress=False)
    (tmp_path / "0001.safetensors").write_bytes((tmp_path / "0000.safetensors").read_bytes())
    with pytest.raises(CalibrationError, match=r"does not hold 2\.weight"):
        qtk.apply_layerwise(problem()[0], data, ["seq_mse"], options=qtk.LayerwiseOptions(checkpoint_dir=tmp_path),
                            progress=False)
    (tmp_path / "run.json").write_text("{", encoding="utf-8")
    with pytest.raises(CalibrationError, match=r"run\.json is not a run"):
        qtk.apply_layerwise(problem()[0], data, ["seq_mse"], options=qtk.LayerwiseOptions(checkpoint_dir=tmp_path),
                            progress=False)
    (tmp_path / "run.json").write_text(json.dumps(["a list"]), encoding="utf-8")
    with pytest.raises(CalibrationError, match="another run"):
        qtk.apply_layerwise(problem()[0], data, ["seq_mse"], options=qtk.LayerwiseOptions(checkpoint_dir=tmp_path),
                            progress=False)
    file = tmp_path / "file"
    file.write_text("", encoding="utf-8")
    with pytest.raises(CalibrationError, match="checkpoint_dir"):
        qtk.apply_layerwise(problem()[0], data, ["seq_mse"], options=qtk.LayerwiseOptions(checkpoint_dir=file),
                            progress=False)


@pytest.mark.slow
def test_a_flipped_bit_in_a_tensor_or_a_number_is_noticed(tmp_path):
    sim, data = problem()
    qtk.apply_layerwise(sim, data, METHODS, options=qtk.LayerwiseOptions(checkpoint_dir=tmp_path), progress=False)
    path = tmp_path / "0001.safetensors"
    good = path.read_bytes()
    for bit in torch.randint(0, 8 * len(good), (15,), generator=torch.Generator().manual_seed(0)).tolist():
        flipped = bytearray(good)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(flipped))
        with pytest.raises(CalibrationError, match=r"0001\.safetensors"):
            qtk.apply_layerwise(problem()[0], data, METHODS, options=qtk.LayerwiseOptions(checkpoint_dir=tmp_path),
                                progress=False)


@pytest.mark.medium
def test_the_same_names_and_weights_in_another_model_are_another_run(tmp_path):
    x = torch.randn(32, 8)
    linears = nn.Linear(8, 8), nn.Linear(8, 8)
    for activation, refused in ((nn.ReLU(), False), (nn.GELU(), True)):
        sim = qtk.QuantSim(nn.Sequential(linears[0], activation, linears[1]).eval(), x, activation_bits=None)
        sim.compute_encodings(None, progress=False)
        if refused:
            with pytest.raises(CalibrationError, match="not the same model"):
                qtk.apply_gptq(sim, [x], options=qtk.LayerwiseOptions(checkpoint_dir=tmp_path), progress=False)
        else:
            qtk.apply_gptq(sim, [x], options=qtk.LayerwiseOptions(checkpoint_dir=tmp_path), progress=False)


@pytest.mark.medium
def test_nothing_is_written_through_a_link(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("ten years", encoding="utf-8")
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("run.part", "0000.part"):
        (folder / name).symlink_to(precious)
    sim, data = problem()
    qtk.apply_layerwise(sim, data, ["seq_mse"], options=qtk.LayerwiseOptions(checkpoint_dir=folder), progress=False)
    assert precious.read_text(encoding="utf-8") == "ten years"
    assert not any((folder / name).is_symlink() for name in ("run.json", "0000.safetensors"))


@pytest.mark.medium
def test_a_full_disk_is_named_and_leaves_no_half_file(tmp_path, monkeypatch):
    sim, data = problem()
    before, replace = state(sim), os.replace

    def full(source, target):
        if str(target).endswith("0001.safetensors"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CalibrationError, match=r"cannot write .*0001\.safetensors: No space left on device"):
        qtk.apply_layerwise(sim, data, ["seq_mse"], options=qtk.LayerwiseOptions(checkpoint_dir=tmp_path),
                            progress=False)
    assert sorted(os.listdir(tmp_path)) == ["0000.safetensors", "run.json"]
    assert all(torch.equal(before[name], value) for name, value in state(sim).items())


@pytest.mark.medium
def test_half_files_of_a_killed_run_are_deleted(tmp_path):
    sim, data = problem()
    (tmp_path / ".0001.safetensors.c0ffee00.part").write_bytes(b"half")
    (tmp_path / "other.part").write_bytes(b"not ours")
    qtk.apply_layerwise(sim, data, ["seq_mse"], options=qtk.LayerwiseOptions(checkpoint_dir=tmp_path), progress=False)
    assert [name for name in sorted(os.listdir(tmp_path)) if name.endswith(".part")] == ["other.part"]
