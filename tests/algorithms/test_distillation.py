"""The distillation loss against its definition in float64, and against torch's own loss at the limits."""

import pytest
import torch

import qtk
from qtk.errors import ConfigError


def defined(scores, teacher, temperature):
    p, q = (torch.softmax(each.double() / temperature, -1) for each in (teacher, scores))
    return temperature**2 * (p * (p / q).log()).sum(-1).mean()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("shape", [(10,), (6, 10), (2, 5, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_divergence_from_the_teacher(shape, temperature, dtype):
    torch.manual_seed(0)
    scores, teacher = (3 * torch.randn(shape, dtype=dtype) for _ in range(2))
    loss = qtk.distillation_loss(scores, teacher, temperature=temperature)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), defined(scores, teacher, temperature), rtol=1e-5, atol=1e-6)


def test_gradients_go_to_the_student_alone():
    torch.manual_seed(0)
    scores, teacher = (torch.randn(4, 5, requires_grad=True) for _ in range(2))
    qtk.distillation_loss(scores, teacher, temperature=2.0).backward()
    expected = 2.0 * (torch.softmax(scores / 2, -1) - torch.softmax(teacher / 2, -1)) / 4
    torch.testing.assert_close(scores.grad, expected.detach())
    assert teacher.grad is None


def test_a_sure_teacher_is_cross_entropy_with_its_labels():
    torch.manual_seed(0)
    scores, labels = torch.randn(8, 5), torch.arange(8) % 5
    teacher = 1000.0 * torch.nn.functional.one_hot(labels, 5)
    torch.testing.assert_close(
        qtk.distillation_loss(scores, teacher), torch.nn.functional.cross_entropy(scores, labels)
    )


def test_bad_arguments():
    with pytest.raises(ConfigError, match=r"\(2, 3\).*\(2, 4\).*same inputs"):
        qtk.distillation_loss(torch.zeros(2, 3), torch.zeros(2, 4))
    for temperature in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="temperature must be above 0"):
            qtk.distillation_loss(torch.zeros(2, 3), torch.zeros(2, 3), temperature=temperature)


@pytest.mark.parametrize("student_masks", [True, False])
def test_classes_that_the_teacher_rules_out_add_nothing(student_masks):
    torch.manual_seed(0)
    scores, teacher = torch.randn(4, 5), torch.randn(4, 5)
    teacher[:, 3:] = -torch.inf
    if student_masks:
        scores[:, 3:] = -torch.inf
    scores.requires_grad_()
    loss = qtk.distillation_loss(scores, teacher)
    loss.backward()
    p, log_q = torch.softmax(teacher.double(), -1)[:, :3], torch.log_softmax(scores.detach().double(), -1)[:, :3]
    torch.testing.assert_close(loss.double(), (p * (p.log() - log_q)).sum(-1).mean(), rtol=1e-5, atol=1e-6)
    expected = (torch.softmax(scores.detach(), -1) - torch.softmax(teacher, -1)) / 4
    torch.testing.assert_close(scores.grad, expected, rtol=1e-5, atol=1e-6)
