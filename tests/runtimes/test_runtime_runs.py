from pathlib import Path

import pytest
import torch

from qtk.analysis.simulated_values import SimulatedValue
from qtk.errors import ExportError
from qtk.report.runtime_nodes import RuntimeNodes
from qtk.runtimes.runtime_runs import FLOAT, RuntimeRuns


class Doubling:
    """A runtime of one function: twice its input, a row a call, and something wrong from a row on."""

    runtime, inputs, outputs, sites = "Doubling 1.0", ["x"], ["y"], ["a:out"]

    def __init__(self, *, wrong: float = 0.0, most: int = 100) -> None:
        self.wrong, self.most, self.rows = wrong, most, []

    def run(self, inputs, *, sites=False):
        x = inputs["x"]
        if len(x) > self.most:
            raise RuntimeError("too many rows")
        values = {"y": (2 * x + self.wrong).unsqueeze(1)}
        return values | ({"a:out": x.unsqueeze(1)} if sites else {})

    def timed(self, inputs):
        self.rows.append(len(inputs["x"]))
        return lambda: self.run(inputs)

    def nodes(self):
        return RuntimeNodes({"DOUBLE": 1})


def opener(loaded):
    return lambda file, reasons, threads: loaded


def refusing(file, reasons, threads):
    raise ExportError("it has no kernel")


def compared(ways, x=None):
    x = torch.randn(4, 3) if x is None else x
    runs = RuntimeRuns(Path("model.double"), {}, ways)
    step = torch.tensor(0.1)
    runs.compare({"input": x}, [SimulatedValue(2 * x, step)], {("a:out", 0): SimulatedValue(x, step)})
    return runs


def test_each_way_is_compared_by_outputs_and_sites():
    right, off = compared({"right": opener(Doubling()), "off": opener(Doubling(wrong=0.3))}).runs()
    assert (right.total.differing, right.top1, right.first_departure) == (0.0, 1.0, None)
    assert off.total.max_steps == pytest.approx(3.0, rel=1e-4)
    assert right.nodes.integers() == "1 DOUBLE"
    assert [site.name for site in off.sites] == ["a:out"]


def test_a_way_that_refuses_says_so_and_the_others_run():
    runs = compared({"a": refusing, "b": opener(Doubling())})
    assert runs.runs()[0].refusal == "it has no kernel"
    assert runs.runs()[1].total.differing == 0
    with pytest.raises(ExportError, match="it has no kernel"):
        RuntimeRuns(Path("model.double"), {}, {"a": refusing})
    with pytest.raises(ExportError, match=r"model\.double: Doubling 1\.0 does not run it: RuntimeError: too many rows"):
        compared({"b": opener(Doubling(most=3))})


def test_another_number_of_inputs_or_outputs_is_refused():
    runs = RuntimeRuns(Path("model.double"), {}, {"a": opener(Doubling())})
    with pytest.raises(ExportError, match="the file takes x, the model x, y"):
        runs.compare({"x": torch.zeros(1), "y": torch.zeros(1)}, [], {})
    with pytest.raises(ExportError, match="the file returns 1 tensors, the model 0"):
        runs.compare({"x": torch.zeros(1)}, [], {})
    with pytest.raises(ExportError, match="y has 3 values, the model's output 4"):
        runs.compare({"x": torch.zeros(1, 3)}, [SimulatedValue(torch.zeros(4))], {})


@pytest.mark.parametrize(("most", "rows"), [(100, 7), (4, 4)])
def test_latency_is_of_the_rows_that_were_asked_for_or_that_run(most, rows):
    loaded, in_float = Doubling(most=most), Doubling()
    runs = RuntimeRuns(Path("model.double"), {}, {
        "a": lambda file, reasons, threads: in_float if file.name == FLOAT else loaded}, threads=1)
    runs.measure({"x": torch.randn(4, 3)}, Path(FLOAT), turns=2, progress=False, batch_size=7)
    (run,) = runs.runs()
    assert run.latency_ms > 0
    assert run.float_latency_ms > 0
    assert (loaded.rows, in_float.rows, runs.timing.rows, runs.timing.threads) == ([rows], [rows], rows, 1)


class Sums(Doubling):
    inputs = ("x", "state", "scale")

    def timed(self, inputs):
        self.rows.append({name: tuple(value.shape) for name, value in inputs.items()})
        return lambda: self.run(inputs)

    def run(self, inputs, *, sites=False):
        return super().run({"x": inputs["x"] + inputs["state"][0] * inputs["scale"]})


def test_rows_of_a_state_are_taken_along_its_batch_axis():
    loaded = Sums()
    runs = RuntimeRuns(Path("model.sums"), {}, {"a": opener(loaded)}, threads=1)
    runs.measure({"x": torch.randn(4, 3), "state": torch.randn(1, 4, 3), "scale": torch.tensor(2.0)}, None, turns=1,
                 progress=False, batch_size=2)
    assert loaded.rows == [{"x": (2, 3), "state": (1, 2, 3), "scale": ()}]
    assert runs.timing.rows == 2
