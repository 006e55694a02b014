"""The search takes the assignment that loses least within the budget, by brute force and as measured."""

import itertools
import math

import pytest
import torch
from torch import nn

import qtk
from qtk.auto.bit_search import BitSearch
from qtk.auto.latency import OpLatencies, WholeLatency
from qtk.auto.matrix_products import matrix_products
from qtk.calibration.calibrate import CalibrationData
from qtk.errors import CalibrationError, ExportError
from qtk.graph.footprint import footprint
from tests.auto.three_layers import BATCHES, assigned, error, mlp, widths


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("budget", [4.0, 5.0, 6.0, 7.0, 8.0, 16.0])
def test_mean_width_stays_within_the_budget_and_beats_equal_widths(budget):
    sim, found = assigned({"weight_bits": budget})
    elements = {"0.weight": 16 * 32, "2.weight": 32 * 32, "4.weight": 32 * 4}
    got = widths(sim)
    assert sum(got[name] * count for name, count in elements.items()) / sum(elements.values()) == pytest.approx(
        found.cost)
    assert found.cost <= budget
    assert {row.name: row.width for row in found.rows} == {name: got[name] for name in elements}
    assert error(sim) == pytest.approx(found.measured[0].loss, rel=1e-6)
    assert all(found.measured[0].loss <= row.loss for row in found.measured if row.fits)


@pytest.mark.medium
def test_the_site_that_loses_most_gets_the_bits():
    sim, found = assigned({"weight_bits": 7.0}, choices=(4, 8))
    assert found.rows[0].name == "2.weight"
    assert widths(sim)["2.weight"] == 8
    assert widths(sim)["0.weight"] == 4


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("limit", [1_500, 2_500, 4_000])
@pytest.mark.parametrize("choices", [(4, 8, 16), (3, 8, "float")])
def test_bytes_are_those_of_the_model(limit, choices):
    sim, found = assigned({"bytes": limit}, choices=choices)
    assert footprint(sim.model).quantized_bytes == found.cost <= limit


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("share", [0.3, 0.6, 1.2])
def test_bit_operations_are_those_of_the_plan(share):
    limit = share * 64 * 64 * (16 * 32 + 32 * 32 + 32 * 4)
    sim, found = assigned({"bit_operations": limit})
    got = widths(sim)
    products = matrix_products(sim.simulation, lambda: sim.model(BATCHES[0]))
    assert sum(each.multiplications * got[each.operands[0].name] * got[each.operands[1].name]
               for each in products) == found.cost <= limit


@pytest.mark.medium
def test_residual_streams_are_found_without_being_told():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x):
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Block(), Block(), nn.LayerNorm(16), nn.Linear(16, 4)).eval()
    with torch.no_grad():
        model[0].weight[0] *= 300  # one channel of the stream, which the norms make small again
        model[0].bias[0] += 300
        for norm in (model[1].norm, model[2].norm, model[3]):
            norm.weight[0] /= 100
    everything = {"version": 1, "defaults": {"activation": {"symmetric": False}}}
    sim, found = assigned({"bit_operations": 1.3e8}, model=model, config=everything, choices=(8, 16))
    stream = {name for name in widths(sim) if name in ("0:out", "1.add:out", "2.add:out")}
    assert {row.name for row in found.rows if row.width == 16} >= stream
    assert len(stream) == 3
    assert found.measured[0].loss < min(row.loss for row in found.measured if row.what == "all 8 bits") / 10


@pytest.mark.medium
def test_a_loss_of_ones_own_decides():
    targets = torch.randint(0, 4, (64,), generator=torch.Generator().manual_seed(1))

    def loss(output, batch):
        return nn.functional.cross_entropy(output, targets)

    sim, found = assigned({"weight_bits": 6.0}, loss=loss)
    with torch.no_grad():
        expected = sum(loss(sim.model(batch), batch).item() for batch in BATCHES) / len(BATCHES)
    assert found.measured[0].loss == pytest.approx(expected, rel=1e-5)
    assert "loss" in str(found)


@pytest.mark.medium
def test_values_that_carry_a_mask_stay_in_float():
    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(16, 16)

        def forward(self, x, mask):
            x = self.first(x)
            return (x @ x.mT + mask).softmax(-1) @ x

    torch.manual_seed(0)
    mask = torch.zeros(64, 64).masked_fill(torch.ones(64, 64).triu(1) > 0, float("-inf"))
    data = [(batch, mask) for batch in BATCHES]
    sim = qtk.QuantSim(Scores().eval(), data[0], config={"version": 1})
    found = qtk.assign_bits(sim, data, budget={"bit_operations": 1e15}, choices=(4, 8), progress=False)
    masked = {site.name for site in sim.simulation.dropped}
    assert "mask:input" in masked
    assert not masked & {row.name for row in found.rows}
    sim.check()


def product_ms(latencies, product, data, other):
    """A runtime in which a product takes as many ms as its operands have bits."""
    return float(sum(32 if width == "float" else width for width in (data, other)))


def whole_ms(sim):
    """And the rest of a model 10."""
    bits, products = widths(sim), matrix_products(sim.simulation, lambda: sim.model(BATCHES[0]))
    return 10.0 + sum(32.0 if site is None else bits[site.name] for each in products for site in each.operands)


def measure_by(milliseconds, monkeypatch):
    """A machine that is at half its speed when the first simulation is measured."""
    def ratio(self, sim, *, progress):
        base = vars(self).setdefault("base", milliseconds(sim))
        self.first_ms = base * (2.0 if math.isinf(self.first_ms) else 1.0)
        return milliseconds(sim) / base

    monkeypatch.setattr(WholeLatency, "ratio", ratio)


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("limit", [60.0, 120.0, 150.0])
def test_milliseconds_are_those_that_were_measured(limit, monkeypatch):
    monkeypatch.setattr(OpLatencies, "ms", product_ms)
    measure_by(whole_ms, monkeypatch)
    sim, found = assigned({"milliseconds": limit})
    assert whole_ms(sim) == pytest.approx(found.cost)
    assert limit - 24 < found.cost <= limit + 1e-9
    assert "4:out" not in {row.name for row in found.rows}  # which no product reads


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("limit", [70.0, 100.0, 130.0, 180.0])
@pytest.mark.parametrize("mixed_ms", [20.0, 60.0])
def test_widths_that_cost_more_together_than_alone_still_meet_the_budget(limit, mixed_ms, monkeypatch):
    """Conversions between widths take time that no product has; what was measured within the budget is not lost."""
    def mixed(sim):
        products = matrix_products(sim.simulation, lambda: sim.model(BATCHES[0]))
        some_in_float = {site is None for each in products for site in each.operands} == {True, False}
        return whole_ms(sim) + mixed_ms * some_in_float

    monkeypatch.setattr(OpLatencies, "ms", product_ms)
    measure_by(mixed, monkeypatch)
    sim, found = assigned({"milliseconds": limit}, choices=(8, "float"))
    assert found.cost == pytest.approx(mixed(sim))
    assert found.cost <= limit


@pytest.mark.medium
def test_a_mix_that_the_runtime_refuses_leaves_what_was_measured(monkeypatch):
    calls = itertools.count()

    def refusing(sim):
        if next(calls) > 3:  # all 4, all 8, twice each
            raise ExportError("no such mix")
        return whole_ms(sim)

    monkeypatch.setattr(OpLatencies, "ms", product_ms)
    measure_by(refusing, monkeypatch)
    with pytest.warns(match="refuses a mix of widths.*no such mix") as caught:
        sim, found = assigned({"milliseconds": 50.0}, choices=(4, 8))
    assert found.cost <= 50.0
    assert found.cost == pytest.approx(whole_ms(sim))
    assert str(caught[0].filename) == __file__


@pytest.mark.slow
def test_milliseconds_in_the_runtime():
    pytest.importorskip("onnxruntime")
    sim = qtk.QuantSim(mlp(), BATCHES[0], config="onnxruntime")
    found = qtk.assign_bits(sim, BATCHES, budget={"milliseconds": 1e3}, progress=False)
    assert found.measured[0].cost < 1e3
    assert set(widths(sim)) == {"4:out"}  # which no product reads
    assert error(sim) < 1e-3


def test_a_budget_with_room_for_float_has_nothing_to_quantize():
    with pytest.raises(CalibrationError, match="room for the whole model in float"):
        assigned({"bytes": 1e9}, choices=(8, "float"), activation_bits=None)


@pytest.mark.medium
def test_too_small_a_budget_says_the_least():
    with pytest.raises(CalibrationError, match=r"below the least that \[4, 8, 16\] can reach, 4"):
        assigned({"weight_bits": 3.9})


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("budget", [4.0, 5.9, 11.3])
def test_the_assigned_widths_have_the_least_sum_of_estimates_of_all(budget):
    _, found = assigned({"weight_bits": budget}, choices=(4, 8, 16))
    elements = {"0.weight": 16 * 32, "2.weight": 32 * 32, "4.weight": 32 * 4}
    sums = [
        sum(row.losses[width] for row, width in zip(found.rows, picked, strict=True))
        for picked in itertools.product((4, 8, 16), repeat=3)
        if sum(width * elements[row.name] for row, width in zip(found.rows, picked, strict=True)) <= budget * sum(
            elements.values())
    ]
    others = found.measured[0].estimated - sum(row.losses[row.width] for row in found.rows)
    estimates = [row.estimated for row in found.measured if row.fits]
    assert min(estimates) == pytest.approx(min(sums) + others)


@pytest.mark.medium
def test_the_simulation_changes_only_when_the_result_is_applied():
    sim = qtk.QuantSim(mlp(), BATCHES[0])
    sim.compute_encodings(BATCHES, progress=False)
    plan, output = str(sim.plan), sim.model(BATCHES[0])
    search = BitSearch(sim, CalibrationData(list(BATCHES), progress=False), "weight_bits", (2, 4), None)
    found = search.found(3.5)
    assert str(sim.plan) == plan
    assert torch.equal(sim.model(BATCHES[0]), output)
    search.apply(found.config)
    assert {name: bits for name, bits in widths(sim).items() if name.endswith("weight")} == {
        row.name: row.width for row in found.rows}
    assert error(sim) == pytest.approx(found.measured[0].loss, rel=1e-6)
