"""Two processes under ``torchrun``, each with half of the data, against one process with all of it."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

import qtk
from qtk.errors import CalibrationError
from tests import fresh

SCHEMES = ("min_max", "percentile(quantile=0.99)", "mse(steps=20)", "entropy(bins=64)", "tf_enhanced")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3), nn.Sigmoid()).eval()


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 2, 6, 6, generator=generator) * (1 + i / 8) for i in range(6)]


def encodings(scheme: str, data: Iterable[torch.Tensor]) -> dict[str, list[object]]:
    sim = qtk.QuantSim(model(), batches()[0], scheme=scheme)
    sim.compute_encodings(data, progress=False)
    return {
        name: [own.scale.tolist(), None if own.zero_point is None else own.zero_point.tolist()]
        for name, own in sim.encodings().items()
    }


def improved(data: list[torch.Tensor], checkpoint: str | None = None) -> dict[str, list[object]]:
    """Weights and their scales after layer-wise methods."""
    sim = qtk.QuantSim(model(), batches()[0], weight_bits=4, activation_bits=None)
    sim.compute_encodings(None, progress=False)
    steps = ["seq_mse", "gptq", "bias_correction"]
    qtk.apply_layerwise(sim, data, steps, options=qtk.LayerwiseOptions(checkpoint_dir=checkpoint), progress=False)
    return {name: value.flatten().tolist() for name, value in sim.model.state_dict().items()}


GROUPS = ["a", "b", "a", "b", "c", "c"]
HOLDOUTS = {"samples": {"holdout": 0.4}, "groups": {"holdout": 0.34, "groups": GROUPS}, "none": {"holdout": 0.0}}


def judged(data: list[torch.Tensor], how: str, part: slice = slice(None), **options: object) -> dict[str, object]:
    """State and winners of a chain whose results are judged on held-out data, and of another one after it."""
    given = dict(HOLDOUTS[how])
    if "groups" in given:
        given["groups"] = GROUPS[part]
    sim = qtk.QuantSim(model(), batches()[0], weight_bits=3, activation_bits=8)
    sim.compute_encodings(data, progress=False)
    qtk.apply_gptq(sim, data, progress=False, options=qtk.LayerwiseOptions(**given))
    again = qtk.LayerwiseOptions(start="float", **given, **options)
    report = qtk.apply_layerwise(sim, data, ["seq_mse", "coordinate_descent"], progress=False, options=again)
    state = {name: value.flatten().tolist() for name, value in sim.model.state_dict().items()}
    held_out = [layer.held_out for layer in report.layers]
    return {"state": state, "winners": [layer.winner for layer in report.layers], "held out": held_out}


def broken_loader(data: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    yield data[0]
    raise OSError("the disk is gone")


def on_a_rank(directory: str) -> None:
    """What each process runs."""
    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    mine = batches()[rank::world]
    found: dict[str, object] = {scheme: encodings(scheme, mine) for scheme in SCHEMES}
    found["activation_mse"] = encodings("activation_mse", mine)
    try:
        encodings("min_max", [torch.full_like(mine[0], torch.nan)] if rank == 1 else mine)
    except CalibrationError as error:
        found["error"] = str(error)
    try:
        encodings("min_max", broken_loader(mine) if rank == 0 else mine)
    except (CalibrationError, OSError) as error:
        found["loader"] = f"{type(error).__name__}: {error}"
    found["improved"] = improved(mine, str(Path(directory, "run")))
    found["resumed"] = improved(mine, str(Path(directory, "run")))
    part = slice(rank, None, world)
    for how in HOLDOUTS:
        found[how] = judged(mine, how, part)
        folder = str(Path(directory, how))
        found[f"{how}, resumed"] = [judged(mine, how, part, checkpoint_dir=folder) for _ in range(2)]
    try:
        qtk.apply_gptq(qtk.QuantSim(model(), mine[0]), mine,
                       options=qtk.LayerwiseOptions(groups=["a", "b", "c"][: 3 - rank]), progress=False)
    except CalibrationError as error:
        found["labels"] = str(error)
    try:
        improved([torch.full_like(mine[0], torch.nan)] if rank == 1 else mine)
    except CalibrationError as error:
        found["layer-wise error"] = str(error)
    try:
        improved([torch.randn(3, 7)] if rank == 1 else mine)
    except qtk.QtkError as error:
        found["layer-wise reading error"] = str(error)
    Path(directory, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    distributed.destroy_process_group()
    os._exit(0)  # torch's own threads now and then abort the interpreter's shutdown ("terminate called ...")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ranks")
    fresh.run_ranks(on_a_rank, 2, str(directory))
    return [json.loads((directory / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("scheme", SCHEMES)
def test_all_ranks_get_the_encodings_of_one_process_bit_for_bit(found, scheme):
    expected = json.loads(json.dumps(encodings(scheme, batches())))
    assert found[0][scheme] == expected
    assert found[1][scheme] == expected
    assert found[0][scheme] != json.loads(json.dumps(encodings(scheme, batches()[::2])))


@pytest.mark.medium
def test_all_ranks_get_the_same_ranges_by_gradients(found):
    """Random signs are drawn batch by batch, so that one process finds others by chance."""
    assert found[0]["activation_mse"] == found[1]["activation_mse"]


@pytest.mark.medium
def test_layer_wise_methods_find_on_all_ranks_what_one_process_finds(found):
    expected = improved(batches())
    for name, numbers in expected.items():
        for own in found:
            torch.testing.assert_close(
                torch.tensor(own["improved"][name]), torch.tensor(numbers), rtol=1e-6, atol=1e-6
            )
            assert own["improved"][name] == found[0]["improved"][name]
            assert own["resumed"][name] == found[0]["improved"][name]
    assert expected != improved(batches()[::2])


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("how", HOLDOUTS)
def test_held_out_data_are_the_same_on_all_ranks_and_in_one_process(found, how):
    """Whole groups too, though the ranks have the labels in another order: a, a, c and b, b, c."""
    expected = judged(batches(), how)
    for own in found:
        assert own[how] == found[0][how]
        assert own[how]["winners"] == expected["winners"]
        assert own[f"{how}, resumed"] == [found[0][how]] * 2
        for name, numbers in expected["state"].items():
            torch.testing.assert_close(
                torch.tensor(own[how]["state"][name], dtype=torch.float64),
                torch.tensor(numbers, dtype=torch.float64), rtol=1e-6, atol=1e-6)
        for errors, expected_errors in zip(own[how]["held out"], expected["held out"], strict=True):
            assert (errors is None) == (how == "none")
            assert errors is None or errors == pytest.approx(expected_errors, rel=1e-4)
    if how != "none":
        assert expected["state"] != judged(batches(), "none")["state"]


@pytest.mark.medium
def test_labels_that_do_not_fit_on_one_rank_are_refused_on_all(found):
    assert [own["labels"] for own in found] == [found[0]["labels"]] * 2
    assert "groups needs a label for each of the 3 calls of the model" in found[0]["labels"]


@pytest.mark.medium
def test_what_is_wrong_with_the_data_of_one_rank_is_said_on_all(found):
    assert "rank 1: CalibrationError: batch 0" in found[0]["error"]
    for own in found:
        assert "NaN" in own["error"]
        assert "NaN or infinity" in own["layer-wise error"]
        assert "batch 0" in own["layer-wise reading error"]


@pytest.mark.medium
def test_whatever_else_stops_one_rank_stops_all(found):
    said = "CalibrationError: batch 1 of the data cannot be read: OSError: the disk is gone"
    assert [found[rank]["loader"] for rank in (0, 1)] == [said, f"CalibrationError: rank 0: {said}"]
