"""Files that came back damaged, edited or from elsewhere: read as they were written, or refused in words."""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import qtk
from qtk.aimet import encodings_aimet
from qtk.aimet.named_encodings import named_encodings
from qtk.cli.model_source import load_weights
from qtk.export import encodings_json
from qtk.export.plan_json import plan_from_json, plan_to_json
from qtk.workflow.store import SIM_FILE, _record_digest
from tests.fuzz.fuzzing import JUNK, damaged, judged, mutated, share, silent

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
FOLDER = Path(tempfile.mkdtemp())


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


def state(sim: qtk.QuantSim) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in sim.model.state_dict().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


SIM = qtk.QuantSim(net(), X)
SIM.compute_encodings([X], progress=False)
SIM.save(FOLDER / "saved")
SIM.export(FOLDER / "exported", formats=["encodings", "encodings_aimet_0.6.1"])
OTHER = qtk.QuantSim(net(), X)
IMPROVED = qtk.QuantSim(net(), X, weight_bits=4)
qtk.apply_gptq(IMPROVED, [X], options=qtk.LayerwiseOptions(checkpoint_dir=FOLDER / "run"), progress=False)
FILES = ("encodings.json", *(f"encodings_aimet_{schema}.json" for schema in ("0.6.1", "1.0.0", "2.0.0")))
SPECS = {each.name: each.encoding.spec for each in named_encodings(SIM.simulation)}
RECORD = json.loads((FOLDER / "saved" / SIM_FILE).read_text(encoding="utf-8"))


def written(path: Path, data: object) -> bool:
    """Whether ``data`` can be JSON at all."""
    try:
        path.write_text(json.dumps(data), encoding="utf-8", errors="surrogatepass")
    except (ValueError, UnicodeError):
        return False
    return True


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("name", FILES)
@given(draws=st.data())
def test_encodings_are_read_or_refused(name, draws):
    original = FOLDER / "exported" / name
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        if draws.draw(st.booleans()):
            path.write_bytes(draws.draw(damaged(original.read_bytes())))
        elif not written(path, draws.draw(mutated(json.loads(original.read_text(encoding="utf-8"))))):
            return
        if name == "encodings.json":
            read = judged("encodings", lambda: encodings_json.read(path))
        else:
            read = judged("encodings", lambda: encodings_aimet.read(path, SPECS))
        if read is not None:
            again = Path(folder) / "again.json"
            encodings_json.export(read, again)
            if any(not encoding.equals(read[site]) for site, encoding in encodings_json.read(again).items()):
                silent(f"{path.name} reads otherwise the second time")


@pytest.mark.medium
@pytest.mark.parametrize("name", FILES)
@share(0.3)
@given(draws=st.data())
def test_encodings_are_loaded_whole_or_not_at_all(name, draws):
    original = FOLDER / "exported" / name
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        if draws.draw(st.booleans()):
            path.write_bytes(draws.draw(damaged(original.read_bytes())))
        elif not written(path, draws.draw(mutated(json.loads(original.read_text(encoding="utf-8"))))):
            return
        before = OTHER.encodings()
        if judged("loaded encodings", lambda: OTHER.load_encodings(path, freeze=False)) is None:
            after = OTHER.encodings()
            if after.keys() != before.keys() or any(not after[site].equals(each) for site, each in before.items()):
                silent(f"{path.name} was refused, and changed the simulation")
        elif OTHER.encodings().keys() != SIM.encodings().keys():
            silent(f"{path.name} was taken, and sites have no encoding")


@pytest.mark.medium
@given(mutated(plan_to_json(SIM.plan)) | st.dictionaries(st.text(max_size=6), JUNK))
def test_plans_are_read_or_refused(data):
    judged("plans", lambda: plan_from_json(data))


@share(0.3)
@given(st.sampled_from(["sim.json", "model.safetensors"]), st.data())
def test_a_damaged_simulation_is_refused_or_the_same(name, draws):
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(shutil.copytree(FOLDER / "saved", Path(folder) / "saved"))
        (saved / name).write_bytes(draws.draw(damaged((saved / name).read_bytes())))
        loaded = judged("saved simulations", lambda: qtk.QuantSim.load(saved, net(), X))
        if loaded is not None and not (same(state(loaded), state(SIM)) and loaded.plan == SIM.plan):
            silent("a damaged simulation is loaded as another one")


@pytest.mark.medium
@share(0.3)
@given(mutated(RECORD))
def test_an_edited_simulation_is_read_or_refused(record):
    with tempfile.TemporaryDirectory() as folder:
        saved = Path(shutil.copytree(FOLDER / "saved", Path(folder) / "saved"))
        if isinstance(record, dict):
            try:
                record = {**record, "digest": _record_digest(record)}  # by someone who knows how
            except (ValueError, TypeError, UnicodeError):
                return
        if written(saved / SIM_FILE, record):
            judged("edited simulations", lambda: qtk.QuantSim.load(saved, net(), X))


@pytest.mark.slow
@share(0.2)
@given(st.sampled_from(["run.json", "0000.safetensors", "0001.safetensors"]), st.data())
def test_a_damaged_checkpoint_is_refused_or_the_same(name, draws):
    with tempfile.TemporaryDirectory() as folder:
        run = Path(shutil.copytree(FOLDER / "run", Path(folder) / "run"))
        content = (run / name).read_bytes()
        if name == "run.json" and draws.draw(st.booleans()):
            record = draws.draw(mutated(json.loads(content)))
            if not written(run / name, record):
                return
        else:
            (run / name).write_bytes(draws.draw(damaged(content)))
        sim = qtk.QuantSim(net(), X, weight_bits=4)
        before = state(sim)
        options = qtk.LayerwiseOptions(checkpoint_dir=run)
        report = judged("checkpoints", lambda: qtk.apply_gptq(sim, [X], options=options, progress=False))
        if not same(state(sim), before if report is None else state(IMPROVED)):
            silent(f"after {'a refused' if report is None else 'an accepted'} checkpoint the weights are others")


@pytest.mark.medium
@given(st.sampled_from([".pt", ".pth", ".safetensors"]), st.data())
def test_files_of_weights_are_read_or_refused(suffix, draws):
    with tempfile.TemporaryDirectory() as folder:
        path, model = Path(folder) / f"weights{suffix}", net()
        tensors = {name: value.clone() for name, value in model.state_dict().items()}
        if draws.draw(st.booleans()):
            content = copy.copy(tensors) if draws.draw(st.booleans()) else draws.draw(JUNK)
            try:
                torch.save(content, path)
            except (OverflowError, ValueError, UnicodeError):
                return
        else:
            save_file(tensors, path)
        if draws.draw(st.booleans()):
            path.write_bytes(draws.draw(damaged(path.read_bytes()) | st.binary(max_size=30)))
        judged("weights", lambda: load_weights(model, path))
