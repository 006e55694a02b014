"""Which layers are worked on, by what the methods say they need."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import qtk
from qtk.errors import CalibrationError
from qtk.layerwise.layer_selection import select_layers
from qtk.moments.required_statistics import RequiredStatistics
from tests.planning.tied_weights import tied, two_axes


@dataclass(frozen=True)
class Idle:
    """A method that changes nothing, with needs to be set."""

    needs_bias: bool = False
    searches_scale: bool = False
    refused: str | None = None
    rows: int = 0
    sees: ClassVar[list[str]] = []

    def min_rows(self, columns):
        return self.rows

    def refuses(self, spec):
        return self.refused

    def required_statistics(self, block):
        return RequiredStatistics(block)

    def apply(self, state):
        self.sees.append(state.name)
        return state


@pytest.fixture(scope="module")
def sim():
    torch.manual_seed(0)
    sim = qtk.QuantSim(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3, bias=False)).eval(), torch.randn(9, 4))
    sim.compute_encodings([torch.randn(9, 4)], progress=False)
    sim.freeze("0.weight")
    return sim


@pytest.mark.parametrize(
    ("methods", "names", "skipped"),
    [
        ([Idle()], ["0.weight", "1.weight"], {}),
        ([Idle(needs_bias=True)], ["0.weight"], {"1.weight": "it has no bias to correct"}),
        ([Idle(needs_bias=True), Idle()], ["0.weight", "1.weight"], {}),
        ([Idle(), Idle(searches_scale=True)], ["1.weight"],
         {"0.weight": "its encoding is frozen; sim.unfreeze(name) first"}),
    ],
)
def test_needs_decide(sim, methods, names, skipped):
    layers, left = select_layers(sim.simulation, methods, None)
    assert [layer.name for layer in layers] == names
    assert left == skipped


def test_a_refusal_is_the_reason_even_if_its_text_is_empty(sim):
    with pytest.raises(CalibrationError, match=r"0\.weight: too small"):
        select_layers(sim.simulation, [Idle(), Idle(refused="too small")], "0.weight")
    with pytest.raises(CalibrationError, match="no layer to work on"):
        select_layers(sim.simulation, [Idle(refused="")], None)


def test_only_named_sites_are_selected_and_reported(sim):
    layers, skipped = select_layers(sim.simulation, [Idle(needs_bias=True)], ["0.weight"])
    assert [layer.name for layer in layers] == ["0.weight"]
    assert skipped == {}


def test_a_method_of_ones_own_is_applied_and_its_need_of_rows_is_told(sim):
    Idle.sees.clear()
    with pytest.warns(UserWarning, match="2 layers saw fewer rows of data than the methods need"):
        report = qtk.apply_layerwise(sim, [torch.randn(9, 4)], [Idle(), Idle(rows=10)],
                                     options=qtk.LayerwiseOptions(holdout=0), progress=False)
    assert Idle.sees == ["0.weight"] * 2 + ["1.weight"] * 2
    assert [layer.reason for layer in report.layers] == [None, None]
    qtk.apply_layerwise(sim, [torch.randn(10, 4)], [Idle(rows=10)], options=qtk.LayerwiseOptions(holdout=0),
                        progress=False)


@pytest.mark.parametrize(("exclude", "others"), [
    ((), two_axes), (("left",), two_axes), (("left",), lambda weight, x: (F.linear(x, weight),)),
])
def test_no_layer_wise_method_rounds_what_another_reader_rounds_otherwise_or_not_at_all(exclude, others):
    made, x = tied(others, exclude=exclude, granularity="per_channel"), torch.randn(64, 8)
    made.compute_encodings([x], progress=False)
    before = made.model.get_parameter("left.weight").clone()
    with pytest.raises(CalibrationError, match="no layer to work on"):
        qtk.apply_gptq(made, [x], progress=False)
    assert torch.equal(before, made.model.get_parameter("left.weight"))
