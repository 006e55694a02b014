"""The loss of a quantized model that learns from the float model it was made of."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from qtk.errors import ConfigError
from qtk.public import public


@public
def distillation_loss(scores: Tensor, teacher_scores: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Returns the Kullback-Leibler divergence of a model's class probabilities from a teacher's.

    >>> import torch
    >>> scores, teacher_scores = torch.tensor([[1.0, 0.0]]), torch.tensor([[2.0, 0.0]])
    >>> distillation_loss(scores, teacher_scores)
    tensor(0.0671)
    >>> distillation_loss(scores, teacher_scores, temperature=4.0)
    tensor(0.1196)

    The average over all leading axes of ``T² Σ p log(p / q)``, where ``p = softmax(teacher_scores / T)`` and
    ``q = softmax(scores / T)``; T² keeps the gradients of one size whatever T is (Hinton et al., arXiv:1503.02531, §2).
    No gradient goes to the teacher. Classes with a teacher's score of -inf add nothing.

    Shape: ``scores`` and ``teacher_scores`` [..., classes], before softmax; result [].

    Args:
        scores: of the model that is trained.
        teacher_scores: of the float model, for the same inputs.
        temperature: T, above 0; more of it gives more weight to classes that the teacher thinks unlikely.

    Raises: ConfigError if the shapes differ, or the temperature is not positive.
    """
    if scores.shape != teacher_scores.shape:
        raise ConfigError(f"distillation_loss: scores of shape {tuple(scores.shape)} and of the teacher "
                          f"{tuple(teacher_scores.shape)}; give both models the same inputs")
    if not temperature > 0:
        raise ConfigError(f"distillation_loss: the temperature must be above 0, got {temperature}")
    classes = max(scores.shape[-1], 1) if scores.ndim else 1
    rows = scores.float().reshape(-1, classes) / temperature
    teacher_rows = teacher_scores.detach().float().reshape(-1, classes) / temperature
    log_q, log_p = rows.log_softmax(-1), teacher_rows.log_softmax(-1)
    ruled_out = log_p == -torch.inf  # 0 · log 0 is 0
    log_q, log_p = (each.masked_fill(ruled_out, 0.0) for each in (log_q, log_p))
    divergence = F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)
    return divergence * temperature**2
