import pytest
import torch

from qtk.layerwise.block_errors import BlockErrors, divergences, power


def test_the_loss_is_the_relative_error_and_the_mean_divergence_of_a_row():
    errors, value = BlockErrors(), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    errors.add_value(value + 0.5, value, 0.1)
    errors.add(BlockErrors(divergences=torch.tensor([0.1, 0.2, 0.3])))
    torch.testing.assert_close(errors.loss(2.0), torch.tensor(4 * 0.25 / 30 + 2 * 0.6 / 3))
    torch.testing.assert_close(errors.loss(0.0), torch.tensor(4 * 0.25 / 30))
    assert BlockErrors().loss(1.0) == 0


def test_scores_diverge_by_rows_and_other_outputs_by_their_relative_error():
    own, wanted = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(2, 3, 5, dtype=torch.float64)
    p, q = wanted.softmax(-1), own.softmax(-1)
    found = divergences(own, wanted)
    torch.testing.assert_close(found.double(), (p * (p / q).log()).sum(-1).flatten(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(divergences(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0])),
                               torch.tensor([0.0, 2 * 4 / 17]))
    assert not len(divergences(torch.zeros(0, 3), torch.zeros(0, 3)))


def test_a_rise_of_one_row_among_many_is_chance_and_a_rise_of_most_is_not():
    before = BlockErrors(divergences=torch.full((20,), 0.1))
    for count, value, more in ((19, 0.2, True), (21, 0.05, False), (1, 0.2, True), (0, 0.0, False)):
        assert BlockErrors(divergences=torch.full((count,), value)).diverges_more(before) is more
    one, most = before.divergences.clone(), before.divergences.clone()
    one[3], most[:15] = 5.0, 0.2
    assert not BlockErrors(divergences=one).diverges_more(before)
    assert BlockErrors(divergences=most).diverges_more(before)
    assert not before.diverges_more(BlockErrors(divergences=most))
    assert not before.diverges_more(before)
    assert not BlockErrors().diverges_more(BlockErrors())
    assert BlockErrors(divergences=torch.tensor([0.2])).diverges_more(BlockErrors(divergences=torch.tensor([0.1])))


@pytest.mark.parametrize("sentinel", [-torch.inf, torch.finfo(torch.float32).min])
def test_sentinels_of_masks_add_nothing(sentinel):
    wanted = torch.tensor([[1.0, 2.0], [sentinel, 4.0]])
    value = (wanted + 0.5).requires_grad_()
    errors = BlockErrors()
    errors.add_value(value, wanted, 0.1)
    errors.loss(0.0).backward()
    torch.testing.assert_close(errors.loss(0.0).detach(), torch.tensor(3 * 0.25 / 21))
    assert value.grad.isfinite().all()
    assert float(power(wanted)) == 21
    found = divergences(torch.tensor([1.0, sentinel]), torch.tensor([2.0, sentinel]))
    torch.testing.assert_close(found.mean(), torch.tensor(0.25))
