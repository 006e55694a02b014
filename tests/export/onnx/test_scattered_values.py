"""Scatters and powers against torch: written out, and in files of a free batch."""

import functools
import itertools

import pytest
import torch
from torch import nn

import qtk
from qtk.export.onnx import scattered_values
from qtk.export.onnx.scattered_values import SCATTERS
from tests.export.onnx.simulated import run_onnx

ATEN = torch.ops.aten
torch.manual_seed(0)
X, SRC, INDEX = torch.randn(5, 4), torch.randn(6, 7), torch.randint(0, 4, (5, 3))
ROW = torch.tensor([3, 0, 0])
CODES = torch.tensor([-7, 2, 5])
OWN = (True, False)


def reductions(op, mean, *args):
    return [(functools.partial(op, include_self=own), (*args[:-1], args[-1], reduce))
            for reduce in ("prod", "amax", "amin", "mean", *mean) for own in OWN]


CALLS = {
    "scatter_reduce": [
        *reductions(ATEN.scatter_reduce.two, ["sum"], X, 1, INDEX, SRC),
        *reductions(ATEN.scatter_reduce.two, ["sum"], X, -2, INDEX, SRC),
        *reductions(ATEN.scatter_reduce.two, [], torch.tensor([3, 3, 3, 4]), 0, ROW, CODES),
        *reductions(ATEN.scatter_reduce.two, [], X[0, 0], 0, ROW[1], SRC[0, 0])[-2:],
        *reductions(ATEN.scatter_reduce.two, [], X, 0, INDEX[:0], SRC)[-2:],
    ],
    "scatter": [(ATEN.scatter.src, (X, 1, torch.tensor([[2], [0]]), SRC))],
    "scatter_add": [(ATEN.scatter_add.default, (X, -1, INDEX, SRC))],
    "scatter_with": [(functools.partial(ATEN.scatter.reduce, reduce=reduce), (X, dim, INDEX, SRC))
                     for reduce in ("add", "multiply") for dim in (0, -1)],
    "scatter_number_with": [(functools.partial(ATEN.scatter.value_reduce, reduce=reduce), (x, 0, INDEX, 3))
                            for reduce in ("add", "multiply") for x in (X, X.long())],
    "index_reduce": [
        *reductions(ATEN.index_reduce.default, [], X, 0, ROW, SRC[:3, :4]),
        *reductions(ATEN.index_reduce.default, [], X, -1, ROW, SRC[:5, :3]),
        *reductions(ATEN.index_reduce.default, [], torch.tensor([3, 3, 3, 4]), 0, ROW, CODES),
    ],
    "vander": [(ATEN.vander.default, (x, count, increasing)) for x, count, increasing in itertools.product(
        (X[0], torch.tensor([0.0, -0.5]), CODES, CODES.int()), (None, 1, 3), OWN)],
}


def test_every_operator_is_called_here():
    assert {each.__name__ for each in SCATTERS.values()} == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_what_torch_computes(name):
    written = getattr(scattered_values, name)
    for operator, args in CALLS[name]:
        options = operator.keywords if isinstance(operator, functools.partial) else {}
        expected, result = operator(*args), written(*args, **options)
        if result is not NotImplemented:
            torch.testing.assert_close(result, expected)
        else:
            assert args[2].shape == args[3].shape  # such a scatter is left to torch
            assert "mean" not in args


class Several(nn.Module):
    """Scatters of the values of a batch; ``target`` is not a part of it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("target", torch.full((4, 3), 0.7))
        self.fc = nn.Linear(6, 3)

    def forward(self, x, at):
        h, codes = self.fc(x), (4 * x).long()
        index, rows = at.unsqueeze(1).expand(-1, 3), self.target
        counted = torch.full((4, 6), 2)
        return [
            *(rows.scatter_reduce(0, index, h, reduce=reduce, include_self=own) for reduce in (
                "mean", "sum", "prod", "amax", "amin") for own in OWN),
            h.clone().scatter_reduce_(-1, index, x, "mean"),
            rows[:, 0].scatter_reduce(0, at, src=h[:, 0], reduce="mean", include_self=False),
            *(counted.scatter_reduce(0, at.unsqueeze(1).expand(-1, 6), codes, "mean", include_self=own) for own in OWN),
            *(rows.index_reduce(0, at, h, reduce, include_self=own) for reduce in (
                "mean", "prod", "amax", "amin") for own in OWN),
            rows.clone().index_reduce_(0, at, h, "mean"),
            *(target.scatter(0, index, value, reduce=reduce) for reduce in ("add", "multiply") for target, value in (
                (rows, h), (rows, 1.5), (counted, 3))),
            *(rows.clone().scatter_(0, index, h, reduce=reduce) for reduce in ("add", "multiply")),
            rows.scatter(1, index[:4, :1], x[:4]), rows.scatter_add(0, index, x),
            rows.scatter_reduce(0, index, x, "amax"), torch.linalg.vander(h, N=3),
        ]


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("shapes", ["batch", None])
def test_files_compute_what_torch_does(shapes, tmp_path):
    torch.manual_seed(0)
    model = Several().eval()
    example, others = ((torch.randn(count, 6), torch.randint(0, 3, (count,))) for count in (9, 14))  # row 3 stays
    sim = qtk.QuantSim(model, example, weight_bits=None, activation_bits=None, dynamic_shapes=shapes)
    sim.export(tmp_path / "out", formats=("onnx",), progress=False)
    for given in (example, others)[:2 if shapes else 1]:
        results = run_onnx(tmp_path / "out" / "model.onnx", *given)
        for result, expected in zip(results, model(*given), strict=True):
            torch.testing.assert_close(torch.from_numpy(result), expected)


class Powers(nn.Module):
    def forward(self, x, codes):
        return [torch.vander(each, count, increasing=increasing)
                for each in (x, codes) for count in (None, 1, 3) for increasing in OWN]


@pytest.mark.medium
def test_files_compute_powers(tmp_path):
    given = torch.randn(4), torch.tensor([-3, 0, 1, 2])
    sim = qtk.QuantSim(Powers(), given, weight_bits=None, activation_bits=None, dynamic_shapes=None)
    sim.export(tmp_path / "out", formats=("onnx",), progress=False)
    for result, expected in zip(run_onnx(tmp_path / "out" / "model.onnx", *given), Powers()(*given), strict=True):
        torch.testing.assert_close(torch.from_numpy(result), expected)


class Pool(nn.Module):
    """A layer whose results are averaged by node of a graph."""

    def __init__(self, own):
        super().__init__()
        self.fc, self.own = nn.Linear(8, 4), own

    def forward(self, x, node):
        pooled = torch.zeros(5, 4)
        return pooled.scatter_reduce(0, node[:, None].expand(-1, 4), self.fc(x), "mean", include_self=self.own)


@pytest.mark.medium
@pytest.mark.parametrize("own", OWN)
def test_quantized_means_of_nodes(own, tmp_path):
    torch.manual_seed(0)
    example = torch.randn(30, 8), torch.randint(0, 4, (30,))
    sim = qtk.QuantSim(Pool(own).eval(), example, config="onnxruntime")
    sim.compute_encodings([example], progress=False)
    sim.export(tmp_path / "out", formats=("onnx",), progress=False)
    for optimized in (False, True):
        (result,) = run_onnx(tmp_path / "out" / "model.onnx", *example, optimized=optimized)
        torch.testing.assert_close(torch.from_numpy(result), sim.model(*example), rtol=0.0, atol=0.03)
