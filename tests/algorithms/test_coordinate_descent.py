"""Against every code of every weight, with every output formed, in float64."""

import itertools

import pytest
import torch

from qtk.algorithms.coordinate_descent import MARGIN, Descent, coordinate_descent
from qtk.algorithms.gptq import gptq
from qtk.algorithms.output_error import OutputError
from qtk.algorithms.weight_grid import WeightGrid
from qtk.core.dtypes import dtype
from qtk.core.spec import QuantSpec

GROUPS, OUTPUTS, WIDTH, ROWS = 2, 6, 20, 90
FORMATS = {"int3": ("int3", True), "uint4": ("uint4", False), "float": ("fp4_e2m1", True)}


class Layer:
    def __init__(self, name="int3", linear=False, width=WIDTH, groups=GROUPS, dead=False):
        generator = torch.Generator().manual_seed(0)
        kind, symmetric = FORMATS[name]
        spec = QuantSpec(dtype(kind), symmetric=symmetric)
        self.weight = torch.randn(groups, OUTPUTS, width, generator=generator).double()
        mixing = torch.randn(groups, width, width, generator=generator).double()
        self.x = torch.randn(groups, ROWS, width, generator=generator).double() @ mixing + 1
        if dead:
            self.x[..., 3] = 0
        self.original = self.x + (0.5 * torch.randn(self.x.shape, generator=generator).double() if linear else 0)
        scale = (0.3 + 0.3 * torch.rand(groups, OUTPUTS, 1, generator=generator)).expand_as(self.weight).contiguous()
        zero = None if symmetric else torch.randint(3, 12, (groups, OUTPUTS, 1)).int().expand(scale.shape).contiguous()
        self.grid = WeightGrid(spec, scale, zero)
        gram = self.x.mT @ self.x
        term = self.weight @ (self.original - self.x).mT @ self.x
        self.error = OutputError(gram[:, None], term[:, None] if linear else None)

    def lost(self, rounded):
        """Squared error of each output. Shape: [groups, outputs]."""
        return (self.original @ self.weight.mT - self.x @ rounded.mT).square().sum(1)

    def gptq(self):
        linear = None if self.error.linear is None else self.error.linear[:, 0]
        return gptq(self.weight, self.error.gram[:, 0], self.grid, linear)

    def run(self, start, **settings):
        return coordinate_descent(self.weight, start, self.grid, self.error, **settings)

    def points(self):
        """All grid points of each weight. Shape: [points, groups, outputs, columns]."""
        wide = torch.linspace(-40, 40, 801).double()[:, None, None, None] * self.grid.scale
        return torch.stack([self.grid.nearest(each) for each in wide])


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_no_pass_raises_the_error_of_an_output(name, linear):
    layer = Layer(name, linear)
    for start in (layer.grid.nearest(layer.weight), layer.gptq()):
        losses = [layer.lost(start), *(layer.lost(layer.run(start, passes=passes)) for passes in (1, 2, 3, 5, 50))]
        for before, after in itertools.pairwise(losses):
            assert bool((after <= before * (1 + 1e-12)).all())
        assert losses[-1].sum() < losses[0].sum()


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("linear", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", FORMATS)
def test_in_the_end_no_other_code_of_a_single_weight_is_better(name, linear):
    layer = Layer(name, linear)
    found = layer.run(layer.gptq(), passes=200)
    assert torch.equal(layer.grid.nearest(found), found)
    least, gram = layer.lost(found), layer.error.gram[:, 0]
    for column in range(WIDTH):
        for points in layer.points()[..., column]:
            other = found.clone()
            other[..., column] = points
            held_back = MARGIN * gram[:, column, column, None] * (points - found[..., column]).square()
            assert bool((layer.lost(other) >= least - held_back).all())


@pytest.mark.medium
def test_close_to_the_best_of_all_codes():
    layer = Layer(width=5, groups=1)
    best = torch.full((OUTPUTS,), torch.inf).double()
    for codes in itertools.product(range(-4, 4), repeat=5):
        candidate = layer.grid.scale[0].double() * torch.tensor(codes).double()
        best = torch.minimum(best, layer.lost(candidate[None])[0])
    start = layer.gptq()
    gap, gap_before = (float((layer.lost(each)[0] - best).sum()) for each in (layer.run(start, passes=50), start))
    assert 0 <= gap < 0.8 * gap_before


def test_inputs_never_seen_leave_their_weights():
    layer = Layer(dead=True)
    start = layer.grid.nearest(layer.weight)
    found = layer.run(start)
    assert torch.equal(found[..., 3], start[..., 3])
    assert not torch.equal(found, start)


@pytest.mark.parametrize("linear", [False, True])
def test_what_follows_from_the_weights_follows_them(linear):
    layer = Layer(linear=linear)
    start = layer.gptq()

    def half_gradient(rounded):
        return layer.error.half_gradient((layer.weight - rounded)[:, None])[:, 0]

    descent = Descent.begin(layer.weight, start, layer.error)
    for _ in range(3):
        is_lower = descent.run_pass(layer.grid)
    assert bool(is_lower.any()), "some outputs are restored"
    assert not bool(is_lower.all())
    assert not torch.equal(descent.rounded, start)
    torch.testing.assert_close(descent.change, layer.weight - descent.rounded)
    torch.testing.assert_close(descent.half_gradient, half_gradient(descent.rounded))


@pytest.mark.parametrize("is_strided", [False, True])
def test_a_single_output_leaves_its_arguments_as_they_were(is_strided):
    layer, one = Layer(groups=1, linear=True), slice(0, 1)
    grid, error, weight = layer.grid[:, one], layer.error.select(slice(None), one), layer.weight[:, one]
    start = grid.nearest(weight)
    if is_strided:
        weight, start = (torch.stack([each, each], -1)[..., 0] for each in (weight, start))
    kept = start.clone()
    found = coordinate_descent(weight, start, grid, error, passes=50)
    assert not torch.equal(found, kept)
    assert torch.equal(start, kept)
