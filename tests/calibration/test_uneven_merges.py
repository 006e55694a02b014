"""What is uneven, and what reads it, of graphs with quantizers; inputs of which ops read slices."""

import pytest
import torch
from torch import nn

import qtk
from qtk.calibration.uneven_merges import UnevenValues, uneven_values
from qtk.numerics.error import sqnr_db


class Largest:
    """Samples of which the largest values are known."""

    def __init__(self, **largest):
        self.values = {name.replace("__", ":"): value for name, value in largest.items()}
        self.members = {}

    def largest(self, site):
        return self.values.get(site.name, 0.0)


class Read(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.read, self.conv, self.other = read, nn.Conv2d(4, 3, 1), nn.Conv2d(2, 3, 1)

    def forward(self, x, y):
        return self.read(self, torch.cat([x, y], 1))


def found(read, **largest):
    x = torch.randn(2, 2, 4, 4)
    sim = qtk.QuantSim(Read(read).eval(), (x, x), config="onnxruntime")
    return uneven_values(Largest(**largest), sim.simulation)


NONE = UnevenValues((), ())


@pytest.mark.parametrize(("y", "expected"), [(0.7, NONE), (0.6, UnevenValues(("concat:out", "mul:out"), ()))])
def test_operands_are_uneven_above_a_ratio_of_sixteen(y, expected):
    assert found(lambda net, both: both * 0.5, x__input=10.0, y__input=y) == expected


def test_what_is_computed_from_them_channel_by_channel_is_uneven_too():
    both = {"x__input": 10.0, "y__input": 0.1}
    assert found(lambda net, both: (-both.relu()).softmax(1) * 2, **both).outputs[0] == "concat:out"
    assert "softmax:out" not in found(lambda net, both: (-both.relu()).softmax(1) * 2, **both).outputs


def test_a_product_needs_one_range_for_all_of_it_but_not_for_a_slice():
    both = {"x__input": 10.0, "y__input": 0.1}
    assert found(lambda net, both: net.conv(both * 2), **both) == NONE
    assert found(lambda net, both: net.other(both[:, :2]), **both) == UnevenValues(("concat:out",), ("other",))


def test_what_is_zero_throughout_is_no_operand():
    assert found(lambda net, both: both * 2, x__input=10.0, y__input=0.0) == NONE


def names_in(code):
    inner = [each for each in code.co_consts if isinstance(each, type(code))]
    return [*code.co_names, *(name for each in inner for name in names_in(each))]


class Table(nn.Module):
    """A net of rows of nine columns: an index, and features in one or two units."""

    def __init__(self, read):
        super().__init__()
        torch.manual_seed(0)
        layers = {"whole": nn.Linear(9, 8), "fc": nn.Linear(8, 8), "four": nn.Linear(4, 8),
                  "table": nn.Embedding(5000, 8)}
        self.read = read
        for name in layers.keys() & set(names_in(read.__code__)):
            self.add_module(name, layers[name])

    def forward(self, x):
        return self.read(self, x)


def rows(seed=0, unit=1.0):
    x = torch.randn(64, 9, generator=torch.Generator().manual_seed(seed))
    return torch.cat([(x[:, :1].abs() * 1000).floor(), x[:, 1:5], unit * x[:, 5:]], 1)


READS = {
    "an index beside features": lambda net, x: net.fc(x[:, 1:]) + net.table(x[:, 0].long()),
    "split": lambda net, x: (lambda ids, rest: net.fc(rest) + net.table(ids[:, 0].long()))(*x.split([1, 8], 1)),
    "a condition": lambda net, x: net.fc(x[:, 1:]) * (x[:, :1] > 800),
    "two units": lambda net, x: net.four(x[:, 1:5]) + net.four(x[:, 5:] / 1000),
    "scaled in the model": lambda net, x: net.fc(x[:, 1:]) + net.four((x[:, :1] / 3000).expand(-1, 4)),
}


def table(read, config, data=None, **settings):
    sim = qtk.QuantSim(Table(read).eval(), rows(**settings), config=config)
    sim.compute_encodings([rows(seed, **settings) for seed in range(4)] if data is None else data, progress=False)
    return sim


@pytest.mark.parametrize("config", ["default", "onnxruntime"])
@pytest.mark.parametrize("read", READS)
def test_columns_that_are_read_apart_have_ranges_apart(read, config):
    unit = 1000.0 if read == "two units" else 1.0
    sim, x = table(READS[read], config, unit=unit), rows(0, unit)
    assert sqnr_db(Table(READS[read])(x).detach(), sim.model(x).detach()) > 28
    assert ("x:input" in sim.quantizers) == (config == "default")


def test_a_file_has_these_ranges(tmp_path):
    sim = table(READS["an index beside features"], "onnxruntime")
    sim.export(tmp_path, formats=("onnx",), progress=False)
    assert sim.verify_export(tmp_path, [rows(9)], turns=0).level.name == "GREEN"


@pytest.mark.parametrize("read", [
    lambda net, x: net.fc(x[:, 1:]) + net.whole(x),  # reads all in one range
    lambda net, x: net.four(x[:, 1:5]) + net.four(x[:, 5:]),
])
def test_an_input_keeps_its_range_where_a_product_reads_it_whole_or_its_slices_are_alike(read, recwarn):
    x = [rows(seed)[:, torch.tensor([5, 1, 2, 3, 4, 5, 6, 7, 8])] for seed in range(2)]
    whole = "whole" in read.__code__.co_names
    sim = table(read, "onnxruntime", [rows(seed) for seed in range(2)] if whole else x)
    assert sim.quantizers["x:input"].spec.dtype.bits == 8
    assert any("it shares a range with its other values" in str(each.message) for each in recwarn) == whole


def test_data_that_run_once_get_a_warning_with_the_rule():
    with pytest.warns(UserWarning, match=r"x:input of fc:in\[0\].*its other values"):
        sim = table(READS["an index beside features"], "onnxruntime", iter([rows(0), rows(1)]))
    assert "x:input" in sim.quantizers
