"""A model with islands is exported as one ONNX file an island, each the bits of the simulation."""

import pytest
import torch
from torch import nn

import qtk
from qtk.atomic import MARKER
from qtk.export.onnx.float_graph import read_names
from qtk.workflow.exported_graphs import onnx_name
from tests.capture.islands import SIZES, is_inside, simulated
from tests.zoo.prepared import slow_but
from tests.zoo.python import PYTHON

ROUNDING = 1e-6
"""What float sums in another order may make of values about 1."""
TIES = {"experts.2": 1}
"""Island → values that may be another code: one of 184 is 7047.4996 steps, and floats there are 5e-4 steps apart."""


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", slow_but(PYTHON, "kinds", "no_input", "tied_islands"))
def test_each_file_computes_what_its_island_computes(name, tmp_path):
    entry, sim = PYTHON[name], simulated(name)
    sim.export(tmp_path / "out", formats=("encodings", "onnx"))
    assert (tmp_path / "out" / "encodings.json").is_file()
    assert {path.stem for path in (tmp_path / "out").glob("*.onnx")} == set(entry.islands)
    result = sim.verify_export(tmp_path / "out", SIZES, forward=lambda model, size: entry.run(model, size), turns=0)
    assert {island.path.stem for island in result.islands} == set(entry.islands)
    for island in result.islands:
        quantized = any(is_inside(site.owner, [island.path.stem.partition("@")[0]]) for site in sim.plan)
        total, ties = island.exact.total, TIES.get(island.path.stem, 0)
        if quantized:
            assert round(total.differing * total.elements) <= ties
            assert total.beyond_one_step == 0.0
        else:
            assert total.max_difference <= ROUNDING


@pytest.mark.slow
def test_an_expert_that_saw_no_token_in_the_example_exports_too(tmp_path):
    entry = PYTHON["experts"]
    sim = qtk.QuantSim(entry.model(), torch.ones(1, 1, 8))
    sim.compute_encodings([entry.inputs()], progress=False)
    sim.export(tmp_path / "out", formats=("onnx",))
    assert sim.verify_export(tmp_path / "out", [entry.inputs(3)], turns=0).exact.differing == 0.0


class ManyIslands(nn.Module):
    """Calls its modules one by one, in Python that no capture follows."""

    def __init__(self, names):
        super().__init__()
        for name in names:
            self._modules[name] = nn.Linear(8, 8)  # add_module refuses a dot

    def forward(self, x):
        for module in self.children():
            x = module(x)
            if float(x.detach().sum()) > 1e9:
                x = -x
        return x


@pytest.mark.medium
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "names",
    [["/x/evil"], ["conv/1", "conv%2F1", "conv_1"], ["a" * 300, "a" * 299 + "b"],
     ["model", "m odel"], ["/" * 300, "模型"]],
    ids=["absolute", "slash", "long", "space", "odd"],
)
def test_names_of_islands_never_become_paths(names, tmp_path):
    x, directory = torch.randn(4, 8), tmp_path / "deep" / "out"
    sim = qtk.QuantSim(ManyIslands(names), x)
    sim.compute_encodings([x], progress=False)
    sim.export(directory, formats=("encodings", "onnx"))
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
    assert [path.name for path in directory.parent.iterdir()] == ["out"]
    assert all(path.is_file() for path in directory.iterdir())
    assert len(list(directory.glob("*.onnx"))) == len(names)
    result = sim.verify_export(directory, [x, -x], turns=0)
    assert result.exact.total.beyond_one_step == 0.0  # 16 bits: a sum in another order may be on the other side
    assert len(result.islands) == (len(names) if len(names) > 1 else 0)
    back = qtk.QuantSim(ManyIslands(names), x)
    sim.save(tmp_path / "saved")
    assert back.load(tmp_path / "saved", ManyIslands(names), x).encodings().keys() == sim.encodings().keys()


def test_a_module_called_dots_stays_inside_too(tmp_path):
    (tmp_path / "out").mkdir()
    for path in ("..", "../evil", "../../evil", "/x/evil", "."):
        (tmp_path / "out" / onnx_name(path)).touch()
    assert len(list((tmp_path / "out").iterdir())) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert MARKER not in {onnx_name(path) for path in (MARKER, "written-by-qtk")}


@pytest.mark.slow
def test_the_float_files_of_islands_hold_all_names(tmp_path):
    entry, sim = PYTHON["kinds"], simulated("kinds")
    sim.export(tmp_path / "out", formats="aimet_1.0.0")
    files = list((tmp_path / "out" / "float").glob("*.onnx"))
    assert {path.stem for path in files} == set(entry.islands)
    names = set.union(*(read_names(path) for path in files))
    assert {site.name for site in sim.plan} <= names
    again = qtk.QuantSim(entry.model(), entry.inputs())
    again.load_encodings(tmp_path / "out" / "encodings_aimet_1.0.0.json")
    assert all(again.encodings()[name].equals(each) for name, each in sim.encodings().items())
