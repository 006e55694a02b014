"""Against forming every output with every candidate, in float64."""

import itertools

import pytest
import torch
from torch.nn import functional

from qtk.algorithms.output_error import OutputError, in_blocks
from qtk.algorithms.seq_mse import MANY_COLUMNS, ScaleCandidates, SearchResult, refine_jointly, search_scales
from qtk.core.dtypes import dtype
from qtk.core.spec import QuantSpec
from qtk.errors import SpecError
from qtk.moments.required_statistics import RequiredStatistics
from qtk.moments.second_moments import SecondMoments
from qtk.numerics.im2col import Geometry, gemm_to_weight, im2col, weight_to_gemm

CANDIDATES = 12
LAYERS = {
    "linear": (Geometry.linear(), (6, 16), (40, 16), functional.linear),
    "conv": (Geometry((3, 3), (2, 2), (1, 1), (1, 1)), (5, 4, 3, 3), (3, 4, 7, 7),
             lambda x, w: functional.conv2d(x, w, stride=2, padding=1)),
    "grouped": (Geometry((3,), (1,), (1,), (1,), 2), (6, 4, 3), (3, 8, 9),
                lambda x, w: functional.conv1d(x, w, padding=1, groups=2)),
    "depthwise": (Geometry((3,), (1,), (1,), (1,), 6), (6, 1, 3), (3, 6, 9),
                  lambda x, w: functional.conv1d(x, w, padding=1, groups=6)),
    "transposed": (Geometry((2, 2), (2, 2), (0, 0), (1, 1), 1, True), (4, 5, 2, 2), (3, 4, 4, 4),
                   lambda x, w: functional.conv_transpose2d(x, w, stride=2)),
}


class Problem:
    """A layer, inputs of both paths, and candidates that shrink the range of each scale."""

    def __init__(self, name: str, granularity: str, *, asymmetric: bool, one_input: bool = False) -> None:
        self.geometry, self.shape, x_shape, self.run = LAYERS[name]
        generator = torch.Generator().manual_seed(0)
        original = torch.randn(x_shape, generator=generator) + 0.3
        quantized = original if one_input else original + 0.2 * torch.randn(x_shape, generator=generator)
        self.weight = torch.randn(self.shape, generator=generator)
        self.inputs = original.double(), quantized.double()
        columns = weight_to_gemm(self.weight, self.geometry)
        self.rows = columns.shape[0] * columns.shape[1]
        width = columns.shape[2]
        self.block = width // 2 if granularity == "block" else width
        self.per_tensor = granularity == "tensor"
        moments = SecondMoments(self.geometry, RequiredStatistics(self.block, dtype=torch.float64))
        moments.observe(quantized, None if one_input else original)
        linear = None
        if moments.cross is not None:
            parts = columns.double().reshape(*columns.shape[:2], -1, self.block).transpose(1, 2)
            linear = (parts @ moments.cross).transpose(1, 2).reshape(columns.shape)
        self.error = OutputError(moments.gram, None if linear is None else in_blocks(linear, width // self.block))
        blocks = columns.reshape(1, -1) if granularity == "tensor" else columns.reshape(-1, self.block)
        low, high = blocks.amin(1).clamp(max=0), blocks.amax(1).clamp(min=0)
        fraction = torch.arange(1, CANDIDATES + 1)[:, None] / CANDIDATES
        self.qmin, self.qmax = (0, 15) if asymmetric else (-8, 7)
        if asymmetric:
            self.scales = (high - low) * fraction / 15
            self.zeros = (-low * fraction / self.scales).round().clamp(0, 15).int()
        else:
            self.scales, self.zeros = torch.maximum(high, -low) * fraction / 7, None

    def search(self, candidates: slice = slice(None)) -> SearchResult:
        columns = weight_to_gemm(self.weight, self.geometry).double()
        shape = *columns.shape[:2], columns.shape[2] // self.block
        owner = torch.zeros(shape, dtype=torch.int64)
        if not self.per_tensor:
            owner = torch.arange(owner.numel()).reshape(shape)
        owner, columns = owner.transpose(1, 2), in_blocks(columns, shape[2])
        spec = QuantSpec(dtype("int4" if self.zeros is None else "uint4"), symmetric=self.zeros is None)
        zeros = None if self.zeros is None else self.zeros[candidates]
        return search_scales(ScaleCandidates(self.error, columns, columns, owner, spec, self.scales[candidates], zeros))

    def brute_force(self) -> torch.Tensor:
        """Squared error of the outputs for every candidate; each block's part of the output by itself.

        Shape: [candidates, scales].
        """
        found = []
        columns = weight_to_gemm(self.weight, self.geometry)
        for scale, zero in zip(self.scales, [None] * CANDIDATES if self.zeros is None else self.zeros, strict=True):
            parts = columns.reshape(1, -1) if self.per_tensor else columns.reshape(-1, self.block)
            start = torch.zeros_like(scale) if zero is None else zero.float()
            code = ((parts / scale[:, None]).round() + start[:, None]).clamp(self.qmin, self.qmax)
            rounded = ((code - start[:, None]) * scale[:, None]).reshape(columns.shape)
            errors = torch.zeros(self.rows, columns.shape[2] // self.block, dtype=torch.float64)
            for index in range(errors.shape[1]):
                kept = torch.zeros(columns.shape[2])
                kept[index * self.block : (index + 1) * self.block] = 1
                own, near = (gemm_to_weight(w * kept, self.geometry, self.shape).double() for w in (columns, rounded))
                apart = self.run(self.inputs[0], own) - self.run(self.inputs[1], near)
                channels = apart.movedim(1 if self.geometry.kernel else -1, 0).flatten(1)
                errors[:, index] = channels.square().sum(1)
            found.append(errors.sum().reshape(1) if self.per_tensor else errors.reshape(-1))
        return torch.stack(found)


@pytest.mark.medium
@pytest.mark.parametrize("one_input", [False, True])
@pytest.mark.parametrize("asymmetric", [False, True])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "block"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_candidate_decided_exactly(name, granularity, asymmetric, one_input):
    if name == "depthwise" and granularity == "block":
        pytest.skip("three columns have no halves")
    problem = Problem(name, granularity, asymmetric=asymmetric, one_input=one_input)
    expected = problem.brute_force()
    found = problem.search()
    least = expected.min(0).values
    chosen = expected.gather(0, found.candidate[None])[0]
    torch.testing.assert_close(chosen, least, rtol=1e-6, atol=0)  # the argmin, or one as good
    constant = expected[0] - problem_error(problem, 0)
    torch.testing.assert_close(found.error + constant, least, rtol=1e-5, atol=1e-9)


def problem_error(problem: Problem, candidate: int) -> torch.Tensor:
    """The error of one candidate without the constant, by a search that has no other."""
    return problem.search(slice(candidate, candidate + 1)).error


def test_better_than_the_widest_range():
    problem = Problem("linear", "channel", asymmetric=False)
    errors = problem.brute_force()
    chosen = errors.gather(0, problem.search().candidate[None])[0]
    assert bool((chosen <= errors[-1]).all())
    assert float(chosen.sum()) < float(errors[-1].sum())


def test_rows_meet_the_columns_of_their_group():
    geometry, shape, x_shape, run = LAYERS["grouped"]
    x, weight = torch.randn(x_shape), torch.randn(shape)
    product = im2col(x, geometry) @ weight_to_gemm(weight, geometry).mT
    expected = run(x, weight)
    torch.testing.assert_close(product[1].reshape(3, 9, 3).mT, expected[:, 3:], rtol=1e-4, atol=1e-5)


def test_scales_of_several_rows_and_blocks():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1, 4, 4, generator=generator, dtype=torch.float64)
    x = torch.randn(50, 4, generator=generator)
    moments = SecondMoments(Geometry.linear(), RequiredStatistics(2, dtype=torch.float64))
    moments.observe(x)
    corners = weight[0].reshape(2, 2, 2, 2).abs().amax((1, 3)).reshape(-1).float()  # [row blocks · column blocks]
    scales = corners * torch.arange(1, 21)[:, None] / 20 / 7
    owner = torch.tensor([[[0, 0, 2, 2], [1, 1, 3, 3]]])
    blocked = in_blocks(weight, 2)
    spec = QuantSpec(dtype("int4"), symmetric=True)
    found = search_scales(ScaleCandidates(OutputError(moments.gram), blocked, blocked, owner, spec, scales))
    for index, own in enumerate(found.candidate.tolist()):
        rows, columns = slice(index // 2 * 2, index // 2 * 2 + 2), slice(index % 2 * 2, index % 2 * 2 + 2)
        part = weight[0, rows, columns]
        errors = [
            float((x[:, columns].double() @ (part - (part.float() / s).round().clamp(-8, 7) * s).T).square().sum())
            for s in scales[:, index]
        ]
        assert errors[own] == pytest.approx(min(errors), rel=1e-6)
    whole = SecondMoments(Geometry.linear())
    whole.observe(x)
    with pytest.raises(SpecError, match="2 scales along the columns"):
        ScaleCandidates(OutputError(whole.gram), blocked, blocked, owner, spec, scales)


def outputs_lost(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, block: int) -> float:
    """Squared error of the outputs with a scale for each output and block."""
    steps = scale.reshape(weight.shape[0], -1).repeat_interleave(block, 1)
    rounded = (weight.float() / steps).round().clamp(-8, 7) * steps
    return float((x.double() @ (weight - rounded).T).square().sum())


@pytest.mark.parametrize("outputs_per_scale", [1, 3])
def test_blocks_that_make_up_for_each_other(outputs_per_scale):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 16, generator=generator, dtype=torch.float64)
    x = torch.randn(200, 16, generator=generator) @ torch.randn(16, 16, generator=generator)
    moments = SecondMoments(Geometry.linear(), RequiredStatistics(dtype=torch.float64))
    moments.observe(x)
    whole = OutputError(moments.gram)
    owner = torch.arange(6 // outputs_per_scale * 4).reshape(-1, 1, 4).expand(-1, outputs_per_scale, 4).reshape(1, 6, 4)
    peak = torch.zeros(owner.max() + 1).scatter_reduce_(
        0, owner.flatten(), weight.reshape(6, 4, 4).abs().amax(-1).flatten().float(), "amax"
    )
    scales = peak * torch.arange(1, 21)[:, None] / 20 / 7
    spec = QuantSpec(dtype("int4"), symmetric=True)
    blocked = in_blocks(weight[None], 4)
    search = ScaleCandidates(whole.diagonal_blocks(4), blocked, blocked, owner.transpose(1, 2), spec, scales)

    def lost(candidate: torch.Tensor) -> float:
        return outputs_lost(x, weight, scales.gather(0, candidate[None])[0][owner[0]], 4)

    alone = search_scales(search).candidate
    found = refine_jointly(search, whole, alone)
    assert lost(found) < 0.95 * lost(alone)
    for scale in range(scales.shape[1]):  # no scale can do better by itself
        for candidate in range(20):
            other = found.clone()
            other[scale] = candidate
            assert lost(other) >= lost(found) * (1 - 1e-6)


@pytest.mark.parametrize(("name", "blocks"), [("int4", 1), ("uint3", 3), ("fp8_e4m3", 3)])
def test_errors_of_uncorrelated_columns(name, blocks):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2, 5, 12, generator=generator, dtype=torch.float64)
    x = torch.randn(2, 40, 12, generator=generator, dtype=torch.float64) * torch.logspace(-1, 1, 12)
    spec = QuantSpec(dtype(name), symmetric=not name.startswith("u"))
    owner = torch.randint(7, (2, blocks, 5), generator=generator)
    scales = torch.rand(4, 7, generator=generator) + 0.1
    zeros = None if spec.symmetric else torch.randint(8, (4, 7), generator=generator, dtype=torch.int32)
    error = OutputError((x.mT @ x)[:, None]).diagonal_blocks(blocks)
    blocked = in_blocks(weight, blocks)
    found = ScaleCandidates(error, blocked, blocked, owner, spec, scales, zeros).uncorrelated_errors(error)
    power, expected = x.square().sum(1), torch.zeros(4, 7, dtype=torch.float64)
    for (candidate, scale), group, output, column in itertools.product(
        ((c, s) for c in range(4) for s in range(7)), range(2), range(5), range(12)
    ):
        if owner[group, column * blocks // 12, output] == scale:
            step, w = scales[candidate, scale].double(), weight[group, output, column]
            zero = 0 if zeros is None else int(zeros[candidate, scale])
            near = ((w / step).round() + zero).clamp(spec.qmin, spec.qmax) - zero
            if name.startswith("fp8"):
                near = (w / step).clamp(spec.qmin, spec.qmax).float().to(torch.float8_e4m3fn).double()
            expected[candidate, scale] += power[group, column] * (w - near * step) ** 2
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("name", ["int4", "fp8_e4m3"])
def test_few_of_many_candidates_of_a_long_block_decide_as_all_do(name):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1, 30, MANY_COLUMNS, generator=generator, dtype=torch.float64)
    x = torch.randn(2000, MANY_COLUMNS, generator=generator, dtype=torch.float64)
    spec, blocked = QuantSpec(dtype(name), symmetric=True), in_blocks(weight, 1)
    scales = weight[0].abs().amax(1).float() / spec.qmax * torch.arange(1, 41)[:, None] / 40
    search = ScaleCandidates(OutputError((x.mT @ x)[None, None]), blocked, blocked,
                             torch.arange(30).reshape(1, 1, 30), spec, scales)
    few, all_of_them = search_scales(search), search_scales(search, exact=True)
    # columns are hardly correlated, so that the six best by the diagonal hold nearly every best one
    assert float((few.error / all_of_them.error - 1).abs().max()) < 0.01
    assert torch.equal(few.present_error, all_of_them.present_error)
    assert float((few.candidate == all_of_them.candidate).double().mean()) > 0.8
