"""Reports how far a simulated language model's distributions are from the float model's distributions."""

from __future__ import annotations

from dataclasses import dataclass

from qtk.public import public


@public
@dataclass(frozen=True, slots=True)
class Divergence:
    """Holds the Kullback-Leibler divergence of next-token distributions, float from simulated, in nats.

    Args:
        mean: over all tokens that count.
        worst: the largest of one token.
        worst_at: where that is: batch, sample and position.
        tokens: how many count.

    >>> print(Divergence(1.2e-3, 0.25, (0, 3, 17), 4096))
    0.0012 nats per token over 4096 tokens; worst 0.25 (batch 0, sample 3, position 17)
    """

    mean: float
    worst: float
    worst_at: tuple[int, int, int]
    tokens: int

    def __float__(self) -> float:
        return self.mean

    def __str__(self) -> str:
        batch, sample, position = self.worst_at
        return (f"{self.mean:.3g} nats per token over {self.tokens} tokens; worst {self.worst:.3g} (batch {batch}, "
                f"sample {sample}, position {position})")
