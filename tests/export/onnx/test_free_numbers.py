"""Operators that read a free size as a number, against torch in files of any size."""

import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import qtk
from qtk.export.onnx.free_numbers import FREE_NUMBERS, free_number_table
from tests.export.onnx.simulated import run_onnx

ATEN = torch.ops.aten

ARITHMETIC = {
    "remainder": lambda x, k, n: (k % n, 9 * x % n, k % (0.37 * n), k.int() % n, n % (k.abs() + 1), n % (x.abs() + 1)),
    "remainder_": lambda x, k, n: (k.clone().remainder_(n), (k.sum() % n)),
    "fmod": lambda x, k, n: (torch.fmod(k, n), torch.fmod(9 * x, n), torch.fmod(k, 0.37 * n)),
    "floor_divide": lambda x, k, n: (k // n, 9 * x // n, k // (0.37 * n), n // (k.abs() + 1)),
    "div": lambda x, k, n: (k / n, x / n, n / (x.abs() + 1), k / (0.3 * n), *(
        torch.div(value, n, rounding_mode=mode) for mode in ("floor", "trunc") for value in (k, 9 * x))),
    "pow": lambda x, k, n: (x.abs() ** n, (k % 2 + 1) ** n, n ** x, n ** (k % 3), k.abs() ** (0.5 * n), x / n ** 0.5),
    "add": lambda x, k, n: (k + n, x + n, k + 0.5 * n, (x > 0) + n, torch.add(x, x, alpha=n), torch.add(x, n, alpha=2)),
    "sub": lambda x, k, n: (k - n, n - k, n - x, torch.sub(k, k + 1, alpha=n), torch.sub(k, n, alpha=2)),
    "rsub": lambda x, k, n: (torch.rsub(k, k + 1, alpha=n), torch.rsub(k, n, alpha=2)),
    "mul": lambda x, k, n: (k * n, x * n, (x > 0) * n, x * (0.5 * n)),
    "add products": lambda x, k, n: (torch.addcmul(x, x, x, value=n), torch.addcdiv(x, x, x.abs() + 1, value=n)),
    "add matrix products": lambda x, k, n: (
        torch.addmm(x @ x.mT, x, x.mT, beta=n), torch.addmm(x @ x.mT, x, x.mT, alpha=n),
        torch.addmv(x[:, 0], x, x[0], beta=n, alpha=n), torch.addr(x, x[:, 0], x[0], beta=n, alpha=n),
        torch.baddbmm((x @ x.mT)[None], x[None], x.mT[None], beta=n, alpha=n)),
    "lerp": lambda x, k, n: torch.lerp(x, -x, n / 10),
}
INTEGERS = {
    "and": lambda x, k, n: (k & n, n & k, k.int() & n, k.clone().bitwise_and_(n)),
    "or": lambda x, k, n: (k | n, n | k, (x > 0) | n),
    "xor": lambda x, k, n: (k ^ n, n ^ k),
    "shift": lambda x, k, n: (k.abs() % 3 << n, 100 * k.abs() >> n, torch.bitwise_left_shift(n, k.abs() % 3)),
    "equal": lambda x, k, n: (k == n, k != n, (x > 0) == n),
    "compare": lambda x, k, n: (k < n, k <= n, k > n, k >= n, 5 * x < n, 5 * x >= n, k < 0.5 * n),
    "indices": lambda x, k, n: (x.topk(5).indices % n, x.flatten().argmax() // n, torch.minimum(k % 7, n - k % 7)),
}
BOUNDS = {
    "clamp": lambda x, k, n: (k.clamp(0, n - 1), (9 * x).clamp(-n, n), k.clamp(max=n), (9 * x).clamp(max=0.1 * n)),
    "clamp one side": lambda x, k, n: (k.clamp_min(n), k.clamp_max(n), k.clamp(max=0.3 * n)),
    "activations": lambda x, k, n: (F.hardtanh(9 * x, -n, n), F.threshold(x, 0.0, n), F.elu(x, n), F.celu(x, n)),
    "slopes": lambda x, k, n: (F.leaky_relu(x, n), F.softplus(x, n)),
}
VALUES = {
    "full": lambda x, k, n: (torch.full((2, 3), n), torch.full((2, n), 1.5), torch.full((3,), 0.5 * n)),
    "full_like": lambda x, k, n: (torch.full_like(x, n), torch.full_like(k, n), x.new_full((2, 3), n)),
    "fill": lambda x, k, n: (torch.fill(x, n), x.clone().fill_(n), x.index_fill(1, torch.tensor([0]), n)),
    "masked_fill": lambda x, k, n: (k.masked_fill(k > 2, n), x.masked_fill(x > 0, n)),
    "where": lambda x, k, n: (torch.where(k > 2, k, n), torch.where(x > 0, n, x), torch.where(x > 0, n, 1)),
    "scatter": lambda x, k, n: (torch.scatter(k, 1, 0 * k, n), torch.scatter(x, 1, 0 * k, n)),
    "tensor": lambda x, k, n: (torch.scalar_tensor(n), torch.tensor(n)),
    "arange": lambda x, k, n: (torch.arange(n), torch.arange(1, n), torch.arange(0, n, 2), torch.arange(n - 1, -1, -1)),
    "linspace": lambda x, k, n: torch.linspace(0, n, 5),
    "triangle": lambda x, k, n: (torch.eye(n), torch.ones(n, n).triu(1), x.tril(n - 3)),
}
MOVES = {
    "repeat": lambda x, k, n: (x[:, :1].repeat(1, n), x[:, :1].tile(n), x.repeat_interleave(2, -1)),
    "repeat_interleave": lambda x, k, n: (
        *(x[:, :2].repeat_interleave(n, axis) for axis in (0, 1, -1, None)),
        x[:, :, None].repeat_interleave(n // 2, 1)),
    "roll": lambda x, k, n: (x.roll(1, -1), x.roll(n // 2, -1), x.roll(-(n // 2), -1), x.roll((n // 2, 1), (-1, 0))),
    "roll of all": lambda x, k, n: x.roll(n // 2),
    "pick": lambda x, k, n: (x.topk(n // 2, -1)[0], x.narrow(1, n // 2, 2), x.select(1, n // 2)),
    "pad": lambda x, k, n: (F.pad(x, (0, n)), F.interpolate(x[None], size=2 * n)),
}
TABLES = {"arithmetic": ARITHMETIC, "integers": INTEGERS, "bounds": BOUNDS, "values": VALUES, "moves": MOVES}


class Several(nn.Module):
    def __init__(self, functions):
        super().__init__()
        self.functions = functions

    def forward(self, x, k):
        return [function(x, k, x.shape[-1]) for function in self.functions]


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("name", TABLES)
def test_files_of_any_size_compute_what_torch_does(name, tmp_path):
    torch.manual_seed(0)
    model = Several(list(TABLES[name].values()))
    example, others = ((torch.randn(size), torch.randint(-20, 20, size)) for size in ((4, 6), (5, 9)))
    sim = qtk.QuantSim(model, example, dynamic_shapes="all", weight_bits=None, activation_bits=None)
    sim.export(tmp_path / "out", formats=("onnx",), progress=False)
    for given in (example, others):
        expected, results = model(*given), iter(run_onnx(tmp_path / "out" / "model.onnx", *given))
        for op, values in zip(TABLES[name], expected, strict=True):
            for value in values if isinstance(values, tuple) else (values,):
                torch.testing.assert_close(torch.from_numpy(next(results)), value, rtol=2e-5, atol=1e-5, msg=(
                    lambda text, op=op, given=given: f"{op} of {tuple(given[0].shape)}: {text}"))


class Columns(nn.Module):
    """Columns of the greatest values of a layer."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 7)

    def forward(self, x):
        h = self.fc(x).mT
        return h.flatten(1).topk(5).indices % h.shape[-1]


@pytest.mark.medium
def test_columns_of_the_greatest_values(tmp_path):
    torch.manual_seed(0)
    example, others = torch.randn(2, 3, 8), torch.randn(4, 6, 8)
    sim = qtk.QuantSim(Columns().eval(), example, dynamic_shapes="all", weight_bits=None, activation_bits=None)
    sim.export(tmp_path / "out", formats=("onnx",), progress=False)
    for x in (example, others):
        (found,) = run_onnx(tmp_path / "out" / "model.onnx", x)
        assert torch.equal(torch.from_numpy(found), sim.model(x))


def test_fixed_numbers_are_left_to_torch():
    table = free_number_table({ATEN.celu.default: lambda *args: "torch"})
    assert table.keys() == FREE_NUMBERS.keys()
    assert table[ATEN.remainder.Scalar](torch.ones(2), 3) is NotImplemented
    assert table[ATEN.celu.default](torch.ones(2), 3.0) == "torch"


@pytest.mark.medium
def test_a_fixed_size_stays_a_constant(tmp_path):
    example = torch.randn(4, 6), torch.randint(-20, 20, (4, 6))
    model = Several([ARITHMETIC["remainder"]])
    sim = qtk.QuantSim(model, example, dynamic_shapes=None, weight_bits=None, activation_bits=None)
    sim.export(tmp_path / "out", formats=("onnx",), progress=False)
    assert "Shape" not in {node.op_type for node in onnx.load(tmp_path / "out" / "model.onnx").graph.node}
    for found, expected in zip(run_onnx(tmp_path / "out" / "model.onnx", *example), model(*example)[0], strict=True):
        torch.testing.assert_close(torch.from_numpy(found), expected)
