import pytest
import torch
from torch import nn

import qtk
from qtk.errors import CheckError
from qtk.graph.insert import quantizer_nodes


@pytest.fixture
def sim():
    torch.manual_seed(0)
    sim = qtk.QuantSim(nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval(), torch.randn(2, 4))
    sim.compute_encodings([torch.randn(8, 4)], progress=False)
    return sim


def test_a_sound_simulation_passes(sim):
    sim.check()


def test_a_quantizer_that_is_no_longer_called_is_found(sim):
    node = next(node for node in quantizer_nodes(sim.model) if "0.weight" in str(node.target))
    node.replace_all_uses_with(node.all_input_nodes[0])
    sim.model.graph.erase_node(node)
    sim.model.recompile()
    with pytest.raises(CheckError, match=r"0\.weight: its quantizer is never executed"):
        sim.check()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_a_broken_scale_is_found(sim, value):
    sim.quantizers["1:out"].scale.fill_(value)
    with pytest.raises(CheckError, match="1:out: "):
        sim.check()


def test_all_findings_are_listed_at_once(sim):
    sim.quantizers["1:out"].mode = qtk.Mode.OBSERVE
    sim.quantizers["x:input" if "x:input" in sim.quantizers else "input:input"].mode = qtk.Mode.BYPASS
    with pytest.raises(CheckError, match=r"2 findings:\n.*BYPASS.*\n.*OBSERVE"):
        sim.check()


def test_a_weight_of_nan_is_found_before_a_file_is_written(sim, tmp_path):
    with torch.no_grad():
        sim.model.get_parameter("0.weight")[0, 0] = float("nan")
    for act in (sim.check, lambda: sim.export(tmp_path / "out", progress=False)):
        with pytest.raises(CheckError, match=r"0\.weight: holds NaN, as weights do after a step of training"):
            act()
    assert not (tmp_path / "out").exists()


def test_a_parameter_that_nothing_reads_may_hold_anything():
    model = nn.Linear(4, 4).eval()
    model.unused = nn.Parameter(torch.full((3,), float("nan")))
    sim = qtk.QuantSim(model, torch.randn(2, 4))
    sim.compute_encodings([torch.randn(8, 4)], progress=False)
    sim.check()
