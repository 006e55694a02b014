"""Different spellings of a formula are one graph in normal form, and it computes what the spelling does."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from qtk.planning.normal_form import NormalForm
from qtk.workflow.prepare import prepare_model

X = torch.rand(2, 3, 8, generator=torch.Generator().manual_seed(0)) + 0.1


class Net(nn.Module):
    def __init__(self, code):
        super().__init__()
        self.code = code
        self.register_buffer("three", torch.tensor(3.0))

    def forward(self, x):
        return self.code(self, x)


def normal_form(code):
    graph = prepare_model(Net(code), X, verify=False)
    form = NormalForm(graph.graph)
    form.graph.eliminate_dead_code()
    return form, graph


def listing(form):
    names = {}
    lines = []
    for node in form.graph.nodes:
        names[node] = f"%{len(names)}"
        args = fx.node.map_arg((node.args, tuple(sorted(node.kwargs.items()))), lambda arg: names[arg])
        lines.append(f"{node.op} {node.target} {args}")
    return lines


EQUAL = {
    "copies and products with 1": [lambda m, x: x.clone().to(torch.float32) * 1, lambda m, x: x / 1],
    "a constant is a number": [lambda m, x: x + m.three, lambda m, x: x + 3.0, lambda m, x: 3.0 + x],
    "numbers are folded": [lambda m, x: x * (m.three * 2), lambda m, x: x * 6.0],
    "a quotient is a product": [lambda m, x: x.exp() / x, lambda m, x: x.exp() * x.reciprocal()],
    "one over a root": [lambda m, x: 1 / x.sqrt(), lambda m, x: x.pow(-0.5), lambda m, x: x.rsqrt()],
    "a square": [lambda m, x: x * x, lambda m, x: x**2, lambda m, x: x.square()],
    "a cube": [lambda m, x: x**3, lambda m, x: x.square() * x],
    "a difference": [lambda m, x: x - 2.0, lambda m, x: x + -2.0],
    "a negative": [lambda m, x: -x, lambda m, x: x * -1],
    "clamp": [lambda m, x: F.relu6(x), lambda m, x: x.clamp(0, 6), lambda m, x: F.hardtanh(x, 0, 6)],
    "clamp from below": [lambda m, x: torch.maximum(x, torch.tensor(0.25)), lambda m, x: x.clamp(min=0.25)],
    "a deviation": [lambda m, x: x.std(-1), lambda m, x: x.var(2).sqrt()],
    "a norm": [lambda m, x: x.norm(dim=-1, keepdim=True), lambda m, x: x.square().sum(2, keepdim=True).sqrt()],
    "the first half": [lambda m, x: x[..., :4], lambda m, x: x.chunk(2, -1)[0], lambda m, x: x.split(4, 2)[0]],
    "the second half": [lambda m, x: x[..., 4:], lambda m, x: x.chunk(2, -1)[1]],
    "even entries": [lambda m, x: x[..., ::2], lambda m, x: x.unflatten(-1, (4, 2))[..., 0]],
    "odd entries": [lambda m, x: x[..., 1::2], lambda m, x: x.reshape(2, 3, 4, 2).unbind(-1)[1]],
}
DIFFERENT = {
    "a factor": [lambda m, x: x * 2, lambda m, x: x * 3],
    "numbers do not commute": [lambda m, x: x - 2.0, lambda m, x: 2.0 - x],
    "a parameter is no number": [lambda m, x: x.sqrt(), lambda m, x: x.pow(0.4)],
    "an axis": [lambda m, x: x.sum(1), lambda m, x: x.sum(2)],
    "biased": [lambda m, x: x.var(-1), lambda m, x: x.var(-1, unbiased=False)],
    "no half": [lambda m, x: x[..., :3], lambda m, x: x[..., :4]],
    "rounded": [lambda m, x: torch.div(x, 0.3, rounding_mode="floor"), lambda m, x: x / 0.3],
}


@pytest.mark.sample(6)
@pytest.mark.medium
@pytest.mark.parametrize("name", EQUAL)
def test_spellings_of_one_formula_are_one(name):
    first, *others = (listing(normal_form(code)[0]) for code in EQUAL[name])
    for other in others:
        assert other == first


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", DIFFERENT)
def test_different_formulas_stay_different(name):
    first, second = (listing(normal_form(code)[0]) for code in DIFFERENT[name])
    assert first != second


@pytest.mark.sample(5)
@pytest.mark.medium
@pytest.mark.parametrize("code", [codes[0] for codes in (EQUAL | DIFFERENT).values()],
                         ids=[*EQUAL, *DIFFERENT])
def test_it_computes_the_same_and_knows_where_from(code):
    form, graph = normal_form(code)
    run = fx.Interpreter(fx.GraphModule(graph, form.graph)).run(X)
    torch.testing.assert_close(run if isinstance(run, torch.Tensor) else run[0], graph(X), rtol=1e-6, atol=1e-6)
    for node in form.graph.nodes:
        if node.op == "call_function":
            assert all(original.graph is graph.graph for original in form.made_by[node])


def test_parameters_are_static_and_no_numbers():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor(3.0))

        def forward(self, x):
            return x * self.w.exp()

    form = NormalForm(prepare_model(Scaled(), X, verify=False).graph)
    assert [str(node.target) for node in form.graph.nodes if node in form.static] == ["w", "aten.exp.default"]
