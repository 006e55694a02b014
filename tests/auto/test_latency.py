"""Latencies of products in ONNX Runtime, and a line that follows what was measured."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import qtk
from qtk.algorithms.frontier import Term
from qtk.auto import latency
from qtk.auto.latency import LatencyModel, OpLatencies, WholeLatency
from qtk.auto.matrix_products import matrix_products
from qtk.auto.widths import Costs
from qtk.errors import CalibrationError, ExportError
from qtk.runtimes.kinds import RuntimeKind, runtime_of
from qtk.runtimes.program_inputs import ProgramInputs


def products_of(model, x, config="onnxruntime"):
    sim = qtk.QuantSim(model.eval(), x, config=config)
    sim.compute_encodings([x], progress=False)
    return sim, matrix_products(sim.simulation, lambda: sim.model(x))


@pytest.fixture
def _few_turns(monkeypatch):
    monkeypatch.setattr(latency, "TURNS", 2)
    monkeypatch.setattr(latency, "WHOLE_TURNS", 2)


@pytest.fixture
def measured(monkeypatch):
    """The files that were measured, as kinds of nodes with their number."""
    import onnx

    files = []

    def computing_ms(file, inputs, *, turns):
        graph = onnx.load(file).graph
        files.append(([node.op_type for node in graph.node], [tuple(each.shape) for each in inputs]))
        return float(len(files))

    monkeypatch.setattr(latency, "computing_ms", computing_ms)
    return files


@pytest.mark.slow
def test_one_measurement_for_each_shape_and_widths(measured):
    pytest.importorskip("onnxruntime")
    layers = [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)]
    _, products = products_of(nn.Sequential(*layers), torch.randn(3, 8))
    table = OpLatencies(qtk.QuantSim(layers[0], torch.randn(3, 8), config="onnxruntime").config)
    first = [table.ms(each, 8, 8) for each in products]
    assert len(measured) == 2
    assert first == [1.0, 1.0, 2.0]
    assert table.ms(products[0], "float", "float") == 3.0
    assert table.ms(products[1], "float", "float") == 3.0
    kinds, inputs = measured[2]
    assert inputs == [(3, 8)]
    assert kinds.count("DequantizeLinear") == 1  # of the result


@pytest.mark.slow
def test_widths_of_data_and_weight_are_set_apart(measured):
    pytest.importorskip("onnxruntime")
    _, (product,) = products_of(nn.Conv2d(3, 8, 3), torch.randn(2, 3, 6, 6))
    table = OpLatencies(qtk.QuantSim(nn.Conv2d(3, 8, 3), torch.randn(2, 3, 6, 6), config="default").config)
    for widths in ((8, "float"), ("float", 8), (8, 8)):
        table.ms(product, *widths)
    assert [kinds.count("QuantizeLinear") for kinds, _ in measured] == [2, 1, 2]
    assert [kinds.count("DequantizeLinear") for kinds, _ in measured] == [2, 2, 3]


@pytest.mark.slow
def test_steps_of_a_loop_take_their_time_each(measured):
    pytest.importorskip("onnxruntime")
    sim, products = products_of(nn.LSTM(3, 5, batch_first=True), torch.randn(2, 7, 3), "default")
    inside = next(each for each in products if each.calls == 7)
    assert OpLatencies(sim.config).ms(inside, 8, 8) == 7.0


@pytest.mark.slow
@pytest.mark.usefixtures("_few_turns")
def test_the_runtime_takes_some_time():
    pytest.importorskip("onnxruntime")
    x = torch.randn(2, 64)
    sim, (product,) = products_of(nn.Linear(64, 64), x)
    assert 0 < OpLatencies(sim.config).ms(product, 8, 8) < 1e3
    whole = WholeLatency(sim.model, x)
    assert [whole.ratio(sim, progress=False), 0 < whole.first_ms < 1e3] == [1.0, True]


@pytest.mark.slow
def test_the_slower_of_two_openings_counts_against_the_first_file(monkeypatch):
    pytest.importorskip("onnxruntime")
    x = torch.randn(2, 4)
    sim, _ = products_of(nn.Linear(4, 4), x)
    found = iter([{"first": 2.5, "again": 2.4}, {"first": 4.0, "once": 3.0, "again": 5.0}, {"first": 2.0, "once": 3.0,
                                                                                              "again": 2.0}])
    monkeypatch.setattr(latency, "median_latencies_ms", lambda runners, **options: next(found))
    whole = WholeLatency(sim.model, x)
    assert [whole.ratio(sim, progress=False) for _ in range(3)] == [1.0, 1.25, 1.5]
    assert whole.first_ms == 2.0


def line(factor, rest):
    costs = Costs(2.0, (Term((0,), np.array([1.0, 5.0])), Term((1,), np.array([3.0, 4.0]))))
    picks = [(0, 0), (1, 1), (0, 1)]
    model = LatencyModel(costs)
    model.fit(picks, [rest + factor * costs.of(each) for each in picks])
    return model, costs


def test_the_line_is_found_and_moved():
    model, costs = line(factor=0.5, rest=20.0)
    assert model.costs.of((1, 0)) == pytest.approx(20.0 + 0.5 * costs.of((1, 0)))
    model.correct({(1, 0): 30.0}, limit=20.0)
    assert model.costs.of((1, 0)) == pytest.approx(30.0)
    assert model.costs.of((0, 0)) == pytest.approx(30.0 - 0.5 * 4.0)


def test_near_a_limit_the_line_is_that_of_the_assignments_next_to_it():
    model, _ = line(factor=0.5, rest=20.0)
    tried = {(0, 0): 23.0, (1, 1): 25.5, (1, 0): 30.0}  # the last costs more than its products say
    model.correct(tried, limit=24.0)
    assert model.costs.of((0, 0)) == pytest.approx(23.0)
    assert model.costs.of((1, 0)) == pytest.approx(30.0)


def test_a_limit_that_is_exceeded_again_and_again_is_approached_from_the_other_side():
    model, _ = line(factor=0.5, rest=20.0)
    tried = {(0, 0): 20.0, (1, 1): 30.0, (1, 0): 28.0}
    model.correct(tried, limit=24.0)
    assert [model.costs.of(each) for each in ((0, 0), (1, 0))] == pytest.approx([20.0, 28.0])
    model.correct(tried | {(0, 1): 26.0}, limit=24.0)
    assert [model.costs.of(each) for each in ((0, 0), (0, 1))] == pytest.approx([22.0, 26.0])


def test_the_line_is_flat_where_fewer_bits_take_longer():
    model, costs = line(factor=-0.5, rest=20.0)
    mean = 20.0 - 0.5 * sum(costs.of(each) for each in ((0, 0), (1, 1), (0, 1))) / 3
    assert model.costs.of((0, 0)) == model.costs.of((1, 1)) == pytest.approx(mean)


def test_islands_have_no_latency_of_their_own():
    with pytest.raises(CalibrationError, match="captured in parts"):
        WholeLatency(nn.Linear(2, 2), torch.randn(1, 2))


@pytest.mark.slow
@pytest.mark.usefixtures("_few_turns")
def test_times_are_taken_in_the_runtime_of_the_target(monkeypatch):
    """Files for a target of another runtime are timed there: whole ones twice, a product with its conversions once."""
    asked = []

    def load(file):
        def timed(inputs):
            asked.append((file.name, [tuple(value.shape) for value in inputs.values()]))
            return lambda: None

        return timed

    monkeypatch.setattr(RuntimeKind, "require", lambda self: None)
    monkeypatch.setattr(latency, "runtime_of", lambda target: replace(runtime_of(target), load=load))
    x = torch.randn(2, 64)
    sim, (product,) = products_of(nn.Linear(64, 64), x, "xnnpack")
    assert OpLatencies(sim.config).ms(product, 8, 8) < 1e3
    assert asked == [("model.pt2", [(2, 64)])]
    whole = WholeLatency(sim.model, x)
    assert whole.ratio(sim, progress=False) == 1.0
    assert asked[1:] == [("model.pt2", [(2, 64)])] * 2
    assert runtime_of(sim.simulation.target).name == "executorch"


def test_a_product_in_float_has_a_time_where_nothing_else_is_quantized(monkeypatch):
    quantizes = []

    def file_ms(kind, file, inputs):
        targets = [str(node.target) for node in ProgramInputs(file).program.graph.nodes]
        quantizes.append(any("quantize" in target for target in targets))
        return len(quantizes)

    monkeypatch.setattr(RuntimeKind, "require", lambda self: None)
    monkeypatch.setattr(latency, "_file_ms", file_ms)
    sim, (product,) = products_of(nn.Linear(8, 8), torch.randn(2, 8), "x86_inductor")
    table = OpLatencies(sim.config)
    assert [table.ms(product, *widths) for widths in ((8, 8), ("float", "float"))] == [1, 2]
    assert quantizes == [True, False]


@pytest.mark.slow
def test_a_runtime_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    x = torch.randn(2, 8)
    sim, _ = products_of(nn.Linear(8, 8), x, "xnnpack")
    with pytest.raises(ExportError, match=r"ExecuTorch needs the package .*qtk\[executorch\]"):
        WholeLatency(sim.model, x).ratio(sim, progress=False)


def test_a_runtime_whose_devices_are_elsewhere_gives_no_milliseconds(monkeypatch):
    untimed = replace(runtime_of("onnxruntime"), untimed="it runs elsewhere for the numbers alone")
    monkeypatch.setattr(latency, "runtime_of", lambda target: untimed)
    sim, _ = products_of(nn.Linear(4, 2), torch.randn(8, 4))
    with pytest.raises(ExportError, match=r"no milliseconds for the target onnxruntime: it runs .*bit_op"):
        WholeLatency(sim.model, torch.randn(8, 4)).ratio(sim, progress=False)
