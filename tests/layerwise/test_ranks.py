"""Statistics of three processes' data against those of one process that has all of it."""

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

import qtk
from qtk.errors import CalibrationError
from qtk.layerwise.ranks import owners_of, spread, sum_over_ranks
from qtk.moments.holdout import Holdout
from qtk.moments.required_statistics import RequiredStatistics
from qtk.moments.second_moments import SecondMoments
from qtk.numerics.im2col import Geometry
from tests import fresh

RANKS, WIDTH = 3, 96
CPU = torch.device("cpu")
EVERYTHING = RequiredStatistics(difference=True, sample_rows=7)
FIGURES = ("gram", "cross", "difference", "mean", "mean_difference")


def batch(rank):
    """Rank 0 has two different inputs, rank 1 no data, rank 2 one input."""
    generator = torch.Generator().manual_seed(rank)
    quantized = torch.randn(5 + rank, WIDTH, generator=generator)
    return quantized, (quantized + 0.1 * torch.randn(quantized.shape, generator=generator) if rank == 0 else None)


def moments_of(ranks, required=EVERYTHING, weight=None):
    moments = SecondMoments(Geometry.linear(), required, weight=weight)
    for rank in ranks:
        moments.observe(*batch(rank))
    return moments


def weight():
    return torch.randn(1, 3, WIDTH, generator=torch.Generator().manual_seed(9))


def on_a_rank(directory):
    """What each process runs."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    gathered, gather = [], distributed.all_gather_object
    distributed.all_gather_object = lambda shares, own: (gathered.append(len(pickle.dumps(own))), gather(shares, own))
    local = None if rank == 1 else moments_of([rank])
    total = sum_over_ranks(local, CPU)
    result = {name: getattr(total, name) for name in FIGURES} | {"rows": total.rows, "sample": total.sample}
    result["gathered"] = sum(gathered)
    result["local"] = None if local is None else local.gram
    narrow = sum_over_ranks(None if rank == 1 else moments_of([rank], RequiredStatistics(), weight()), CPU)
    result["linear"] = narrow.linear(weight())
    apart = RequiredStatistics(holdout=Holdout(0.5))
    result["held out"] = sum_over_ranks(None if rank == 1 else moments_of([rank], apart), CPU).held_out.gram
    owned = sum_over_ranks(None if rank == 1 else moments_of([rank], apart), CPU, owner=2)
    result["owned"] = {name: tuple(each.shape) for name, each in owned.sums.items()}, owned.rows, owned.columns
    result["owned gram"] = (owned.gram, owned.held_out.gram) if rank == 2 else None
    result["nothing"] = sum_over_ranks(SecondMoments(Geometry.linear()) if rank else None, CPU)
    for key, moments, problem in (
        ("problem", None, ValueError("a full disk") if rank == 1 else None),
        ("different", moments_of([rank], RequiredStatistics(gram=rank > 0)), None),
    ):
        try:
            sum_over_ranks(moments, CPU, problem)
        except (CalibrationError, ValueError) as error:
            result[key] = f"{type(error).__name__}: {error}"
    tasks = [lambda number=number: (number, rank) for number in range(4)]
    result["spread"] = spread(tasks, owners_of([1.0, 5.0, 2.0, 1.5]))
    try:
        spread([lambda: 1, lambda: 1 // 0], owners_of([1.0, 2.0]))
    except (CalibrationError, ArithmeticError) as error:
        result["spread problem"] = f"{type(error).__name__}: {error}"
    result["gptq"] = improved(rank)
    torch.save(result, Path(directory, f"{rank}.pt"))
    distributed.destroy_process_group()
    os._exit(0)  # torch's own threads now and then abort the interpreter's shutdown ("terminate called ...")


def improved(rank=None):
    """The weights after GPTQ, of the data of a rank, or of all; two layers read the same input."""
    torch.manual_seed(0)
    x = torch.randn(6, 4, 32) @ torch.randn(32, 32)
    sim = qtk.QuantSim(Siblings().eval(), x[0], weight_bits=3, activation_bits=None)
    sim.compute_encodings(None, progress=False)
    options = qtk.LayerwiseOptions(holdout=0)
    qtk.apply_gptq(sim, x if rank is None else x[rank::RANKS], progress=False, options=options)
    return [parameter.detach() for parameter in sim.model.parameters()]


class Siblings(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x):
        return self.c(self.a(x).relu() * self.b(x))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ranks")
    fresh.run_ranks(on_a_rank, RANKS, str(directory))
    return [torch.load(directory / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.slow
def test_all_ranks_have_the_sums_of_all_data(results):
    expected = moments_of([0, 2])
    for result in results:
        assert result["rows"] == expected.rows == 12
        for name in FIGURES:
            torch.testing.assert_close(result[name], getattr(expected, name), rtol=1e-6, atol=1e-6)
            assert torch.equal(result[name], results[0][name])
        assert result["nothing"] is None


@pytest.mark.medium
def test_the_weight_product_is_summed_where_it_takes_the_place_of_e(results):
    expected = moments_of([0, 2], RequiredStatistics(), weight()).linear(weight())
    for result in results:
        torch.testing.assert_close(result["linear"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.medium
def test_what_is_held_out_is_summed_apart(results):
    first, second = (moments_of([rank], RequiredStatistics(holdout=Holdout(0.5))).held_out for rank in (0, 2))
    assert 0 < first.rows < 5
    for result in results:
        torch.testing.assert_close(result["held out"], first.gram + second.gram, rtol=1e-6, atol=1e-6)


@pytest.mark.medium
def test_gram_matrices_of_a_layer_are_on_its_owner_alone(results):
    required = RequiredStatistics(holdout=Holdout(0.5))
    first, second = (moments_of([rank], required) for rank in (0, 2))
    grams = first.gram + second.gram, first.held_out.gram + second.held_out.gram
    for found, expected in zip(results[2]["owned gram"], grams, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for rank, result in enumerate(results):
        shapes, rows, columns = result["owned"]
        assert (rows, columns) == (first.rows + second.rows, WIDTH)
        assert ("gram" in shapes) == ("cross" in shapes) == (rank == 2)
        assert shapes["sum"] == (1, 1, WIDTH)


@pytest.mark.medium
def test_sample_rows_come_from_all_ranks_in_their_order(results):
    first, second = moments_of([0]), moments_of([2])
    rows = torch.cat([torch.cat([moments.sample[0] for moments in (first, second)], 1)[:, ::2]], 1)
    for result in results:
        torch.testing.assert_close(result["sample"][0], rows)


@pytest.mark.medium
def test_the_sums_of_a_rank_stay_its_own_and_are_not_gathered(results):
    assert torch.equal(results[0]["local"], moments_of([0]).gram)
    for result in results:  # sums of 3 · 96² numbers; only layouts and at most 7 sample rows travel as objects
        assert result["gathered"] < WIDTH * WIDTH


@pytest.mark.medium
def test_what_is_wrong_on_one_rank_is_said_on_all(results):
    assert [result["problem"] for result in results] == [
        "CalibrationError: rank 1: ValueError: a full disk", "ValueError: a full disk",
        "CalibrationError: rank 1: ValueError: a full disk",
    ]
    for result in results:
        assert "different statistics" in result["different"]


def test_tasks_are_spread_by_what_they_cost_and_all_ranks_have_all_results(results):
    for result in results:
        assert result["spread"] == [(0, 2), (1, 0), (2, 1), (3, 2)]
    assert [result["spread problem"].partition(":")[0] for result in results] == [
        "ZeroDivisionError", "CalibrationError", "CalibrationError"]


def test_layers_solved_on_several_ranks_have_the_bits_of_one_process(results):
    expected = improved()
    assert expected
    for result in results:
        assert len(result["gptq"]) == len(expected)
        assert all(torch.equal(*pair) for pair in zip(result["gptq"], expected, strict=True))


def test_one_process_keeps_what_it_has():
    moments = moments_of([0])
    assert sum_over_ranks(moments, CPU) is moments
    with pytest.raises(ValueError, match="a full disk"):
        sum_over_ranks(moments, CPU, ValueError("a full disk"))
