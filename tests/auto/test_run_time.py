"""Estimated run times, op by op, against sums by hand."""

import pytest
import torch
from torch import nn

import qtk
from qtk.auto.run_time import BY_BITS, MOVED, RunTime
from qtk.config.runtime import KernelRow, Kernels, Rates

KERNELS = Kernels(source="test", rows=(KernelRow(op=("linear",), float=1.0, integer=0.5, dynamic=0.6),
                                       KernelRow(op=("add",), float=3.0, integer=2.0)),
                  others=Rates(float=10.0), quantize=7.0, dequantize=5.0)


class Net(nn.Module):
    """Products, a rectifier that is computed with one of them, a function without an integer kernel, and a sum."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 16)

    def forward(self, x):
        x = self.first(x).relu()
        return x + self.second(x).tanh()


def ratio(kernels=KERNELS, samples=4, rules=(), run=None, **settings):
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    config = {"version": 1, "rules": list(rules), "supergroups": [["linear", "relu"]]}
    sim = qtk.QuantSim(Net().eval(), x, config=config, **settings)
    sim.compute_encodings([x], progress=False)
    return RunTime(kernels).ratio(sim.simulation, lambda: sim.model(torch.randn(samples, 8)))


FIRST, SECOND, ROW = 8 * 16, 16 * 16, 16
FLOAT = FIRST + SECOND + 10 * ROW + 3 * ROW


@pytest.mark.medium
@pytest.mark.parametrize(("settings", "time"), [
    # The input is quantized, the tanh between dequantizes and quantizes, the output is dequantized.
    ({}, 7 * 8 + 0.5 * (FIRST + SECOND) + (5 + 10 + 7) * ROW + 2 * ROW + 5 * ROW),
    ({"weight_bits": 4, "activation_bits": 4}, 7 * 8 + 0.5 * (FIRST + SECOND) + (5 + 10 + 7) * ROW + 2 * ROW + 5 * ROW),
    # Weights alone: runtimes keep the weights of float products in float.
    ({"activation_bits": None}, FLOAT),
    # A precise layer: its operands are dequantized.
    ({"rules": [{"match": {"path": "second"}, "weight": "float"}]},
     7 * 8 + 0.5 * FIRST + 5 * ROW + SECOND + 7 * ROW + (5 + 10 + 7) * ROW + 2 * ROW + 5 * ROW),
    # 16 bits: no integer kernel takes them, so that every value is quantized and dequantized around it.
    ({"activation_bits": 16}, (7 + 5) * 8 + FLOAT + (7 + 5) * 4 * ROW),
])
def test_times_are_sums_over_ops_and_conversions(settings, time):
    assert ratio(**settings) == pytest.approx(time / FLOAT)


@pytest.mark.medium
def test_dynamic_quantization_has_kernels_that_read_and_return_floats():
    rules = [{"match": {"path": "*"}, "output": "float"}, {"match": {"op": "linear"}, "input": {"dynamic": True}}]
    time = 0.6 * (FIRST + SECOND) + 10 * ROW + 3 * ROW
    assert ratio(rules=rules) == pytest.approx(time / FLOAT)


@pytest.mark.medium
def test_a_larger_batch_takes_the_same_share():
    assert ratio(samples=32) == pytest.approx(ratio())


@pytest.mark.medium
def test_time_goes_by_bits_where_no_kernel_was_measured():
    wide, narrow = ratio(None, activation_bits=16), ratio(None)
    rows = MOVED * ROW
    assert narrow == pytest.approx(
        (0.25 * (FIRST + SECOND) + 2 * rows / 4 + BY_BITS.quantize * 8 + BY_BITS.dequantize * ROW)
        / (FIRST + SECOND + 2 * rows))
    assert narrow < wide < 1.1


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(8, 16, bidirectional=True, batch_first=True), nn.Linear(32, 8)

    def forward(self, x):
        return self.head(self.gru(x)[0])


@pytest.mark.medium
def test_a_recurrent_layer_counts_by_its_products_where_it_computes_in_float():
    torch.manual_seed(0)
    x = torch.randn(2, 5, 8)
    rules = [{"match": {"op": "gru"}, "weight": "float", "inside": "float"},
             {"match": {"path": "*"}, "output": "float"}, {"match": {"op": "linear"}, "input": {"dynamic": True}}]
    sim = qtk.QuantSim(Recurrent().eval(), x, config={"version": 1, "rules": rules})
    sim.compute_encodings([x], progress=False)
    layer, head = 2 * 5 * 2 * 3 * 16 * (8 + 16), 2 * 5 * 32 * 8  # samples, steps, directions, gates
    kernels = KERNELS.model_copy(update={"rows": (*KERNELS.rows, KernelRow(op=("gru",), float=99.0))})
    found = RunTime(kernels).ratio(sim.simulation, lambda: sim.model(x))
    assert found == pytest.approx((layer + 0.6 * head) / (layer + head))


class OneValue(nn.Module):
    """Attention of a value with itself, without projections."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.first(x)
        return self.last(nn.functional.scaled_dot_product_attention(x, x, x).mean(1))


def test_attention_of_one_value_is_estimated():
    x = torch.randn(4, 5, 8)
    sim = qtk.QuantSim(OneValue().eval(), x)
    sim.compute_encodings([x], progress=False)
    assert RunTime(KERNELS).ratio(sim.simulation, lambda: sim.model(x)) > 0
