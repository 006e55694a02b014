"""A model with islands is exported as one ONNX file an island, each the bits of the simulation."""

import pytest
import torch

import qtk
from tests.capture.islands import SIZES, is_inside, simulated
from tests.zoo.prepared import slow_but
from tests.zoo.python import PYTHON

ROUNDING = 1e-6
"""What float sums in another order may make of values about 1."""


@pytest.mark.parametrize("name", slow_but(PYTHON, "kinds", "no_input", "tied_islands"))
def test_each_file_computes_what_its_island_computes(name, tmp_path):
    entry, sim = PYTHON[name], simulated(name)
    sim.export(tmp_path / "out", formats=("encodings", "onnx"))
    assert (tmp_path / "out" / "encodings.json").is_file()
    assert {path.stem for path in (tmp_path / "out").glob("*.onnx")} == set(entry.islands)
    result = sim.verify_export(tmp_path / "out", SIZES, forward=lambda model, size: entry.run(model, size))
    assert {island.path.stem for island in result.islands} == set(entry.islands)
    for island in result.islands:
        quantized = any(is_inside(site.owner, [island.path.stem.partition("@")[0]]) for site in sim.plan)
        assert island.exact.differing == 0.0 or not quantized
        assert island.exact.max_difference <= (0.0 if quantized else ROUNDING)


def test_an_expert_that_saw_no_token_in_the_example_exports_too(tmp_path):
    entry = PYTHON["experts"]
    sim = qtk.QuantSim(entry.model(), torch.ones(1, 1, 8))
    sim.compute_encodings([entry.inputs()], progress=False)
    sim.export(tmp_path / "out", formats=("onnx",))
    assert sim.verify_export(tmp_path / "out", [entry.inputs(3)]).exact.differing == 0.0
