import pytest
import torch

from qtk.layerwise.block_errors import BlockErrors, divergence, power


def test_the_loss_is_the_relative_error_and_the_mean_divergence_of_a_row():
    errors, value = BlockErrors(), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    errors.add_value(value + 0.5, value, 0.1)
    errors.add(BlockErrors(torch.zeros(()), 0.0, torch.tensor(0.6), 3))
    torch.testing.assert_close(errors.loss(2.0), torch.tensor(4 * 0.25 / 30 + 2 * 0.6 / 3))
    torch.testing.assert_close(errors.loss(0.0), torch.tensor(4 * 0.25 / 30))
    assert BlockErrors().loss(1.0) == 0


def test_scores_diverge_by_rows_and_other_outputs_by_their_relative_error():
    own, wanted = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(2, 3, 5, dtype=torch.float64)
    p, q = wanted.softmax(-1), own.softmax(-1)
    found, rows = divergence(own, wanted)
    torch.testing.assert_close(found.double(), (p * (p / q).log()).sum(), rtol=1e-5, atol=1e-6)
    assert rows == 6
    found, rows = divergence(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    torch.testing.assert_close(found / rows, torch.tensor(4 / 17))
    assert divergence(torch.zeros(0, 3), torch.zeros(0, 3)) == (0, 0)


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
    found, _ = divergence(torch.tensor([1.0, sentinel]), torch.tensor([2.0, sentinel]))
    torch.testing.assert_close(found / 2, torch.tensor(0.25))
