import pytest
import torch

from qtk.analysis.simulated_values import SimulatedValue
from qtk.errors import ExportError
from qtk.runtimes.way import NoCodes, Way, shapes_of, usable_cpus


def test_it_adds_up_what_its_runners_compute():
    way = Way("a way", "a runtime", [lambda feed: {"y": feed["x"] + 1}], NoCodes())
    x = torch.tensor([[1.0, 3.0], [0.0, 2.0]])
    for _ in range(2):
        way.add(["y"], [SimulatedValue(x, torch.tensor(0.5))], {}, way.values({"x": x}))
    run = way.result(3)
    assert (run.total.elements, run.total.differing, run.total.max_steps, run.top1) == (8, 1.0, 2.0, 1.0)
    assert run.unseen_sites == 3


def test_of_several_runners_the_first_counts():
    way = Way("a way", "a runtime", [lambda feed: {"y": 1}, lambda feed: {"y": 2, "z": 3}], NoCodes())
    assert way.values({}) == {"y": 1, "z": 3}


def test_what_a_runner_raises_names_the_runtime():
    way = Way("a way", "a runtime", [lambda feed: {"y": feed["x"]}], NoCodes())
    with pytest.raises(ExportError, match="a runtime cannot run the file: KeyError"):
        way.values({})


def test_an_output_of_another_shape_is_refused():
    way = Way("a way", "a runtime", [], NoCodes())
    with pytest.raises(ExportError, match=r"output 0 has shape \(3,\), the simulation's \(2,\)"):
        way.add(["y"], [SimulatedValue(torch.zeros(2))], {}, {"y": torch.zeros(3)})


def test_the_circumstances_of_a_timing():
    assert shapes_of({"x": torch.zeros(2, 3), "h": torch.zeros(1)}) == "x [2, 3], h [1]"
    assert usable_cpus() >= 1
