"""Promises a drop: a paired test on samples that the search does not see, which counts the settings it has judged."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qtk.errors import CalibrationError

SEARCHED = 0.25
"""Share of the samples that the search sees; the others judge."""

BETS, SEED = 32, 0
"""Bets that are mixed, and the seed of the random cut of the samples."""

FIRST = 0.75
"""Share of α of the first setting that is judged, which most often is the last."""

LOOKS = 128
"""How often the capital is looked at while it grows."""

MIXED = 1.0
"""About what the mixture of bets loses against the best one, in the logarithm of the capital: for forecasts alone."""


@dataclass(slots=True)
class Promise:
    """The samples that a search is judged by, and the bounds that they give.

    With scores ``f`` in float and ``q`` quantized, in [0, 1], a bettor who doubts a drop of ``b`` or more has the
    capital ``Π (1 + λ (b - (f - q)))``, sample by sample. It is a supermartingale if the drop is ``b`` or more, so that
    it ever exceeds 1 / α with a probability of at most α (Ville): then the drop is below ``b``. Bets λ to 1 / (1 - b)
    are mixed, with the weights that their capital on the samples of the search gives them. The settings judged share
    ``α = 1 - confidence``: the first has three quarters, the k-th a quarter / (k (k - 1)).

    Waudby-Smith and Ramdas, Estimating means of bounded random variables by betting, arXiv:2010.09686, section 4;
    mixtures of bets: Orabona and Jun, arXiv:2110.14099, section 3.

    Args:
        scores: of the float model, [samples].
        max_drop: the drop to promise.
        confidence: the probability with which no bound that is given is exceeded.
        judged: settings judged so far.

    Raises: CalibrationError for a confidence that is not between 0 and 1.

    >>> promise = Promise(torch.ones(900), max_drop=0.01, confidence=0.95)
    >>> round(promise.bound(torch.ones(900)), 4), promise.samples_needed(None)
    (0.0064, 569)
    """

    scores: Tensor
    max_drop: float
    confidence: float
    judged: int = 0
    _search: Tensor = field(init=False)
    _judges: Tensor = field(init=False)

    def __post_init__(self) -> None:
        if not 0 < self.confidence < 1:
            raise CalibrationError(f"confidence must be above 0 and below 1, got {self.confidence}")
        order = torch.randperm(len(self.scores), generator=torch.Generator().manual_seed(SEED))
        self._search, self._judges = order.tensor_split([max(1, round(SEARCHED * len(order)))])

    @property
    def judges(self) -> int:
        """The number of samples that judge."""
        return len(self._judges)

    @property
    def is_possible(self) -> bool:
        """Says whether the samples suffice for a setting that changes no score."""
        return self._is_below(torch.zeros(len(self.scores), dtype=torch.float64), self.max_drop, 1)

    def searched_drop(self, scores: Tensor) -> float:
        """The mean drop over the samples that the search sees."""
        return float(self._differences(scores)[self._search].mean())

    def is_promising(self, scores: Tensor) -> bool:
        """Says whether the test will hold the drop if the samples that judge are like the samples of the search."""
        growth = _log_gains(self._differences(scores)[self._search], self.max_drop).mean(1).max()
        return float(growth) * self.judges >= self._log_limit(self.judged + 1)

    def bound(self, scores: Tensor) -> float:
        """The bound on the drop of a setting, which counts as judged."""
        self.judged += 1
        differences = self._differences(scores)
        low, high = float(differences[self._judges].mean()), 1.0
        if self._is_below(differences, self.max_drop, self.judged):
            high = self.max_drop
        else:
            low = max(low, min(self.max_drop, high))
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (low, middle) if self._is_below(differences, middle, self.judged) else (middle, high)
        return high

    def samples_needed(self, scores: Tensor | None) -> int | None:
        """About how many samples hold the drop of a setting, with the samples of the search; ``None``: no number does.

        ``scores``: of the setting; ``None``: of one that changes none.
        """
        differences = torch.zeros(1, dtype=torch.float64) if scores is None else self._differences(scores)
        growth = float(_log_gains(differences, self.max_drop).mean(1).max())
        if growth <= 0:
            return None
        limit = self._log_limit(max(self.judged, 1)) + MIXED
        return math.ceil(limit / growth / (1 - SEARCHED))

    def drops_by_class(self, scores: Tensor, labels: Tensor) -> list[tuple[int, float, int]]:
        """Class, mean drop and number of samples, the largest drop first."""
        differences = self._differences(scores)
        rows = [(int(each), float(differences[labels == each].mean()), int((labels == each).sum()))
                for each in sorted(set(labels.tolist()))]
        return sorted(rows, key=lambda row: -row[1])

    def _is_below(self, differences: Tensor, drop: float, count: int) -> bool:
        """Says whether the setting judged as number ``count`` is shown to lose less than ``drop``."""
        weights = _log_gains(differences[self._search], drop).sum(1).log_softmax(0)
        gains = _log_gains(differences[self._judges], drop)
        step = math.ceil(gains.shape[1] / LOOKS)
        parts = torch.nn.functional.pad(gains, (0, -gains.shape[1] % step)).reshape(BETS, -1, step).sum(2)
        capital = (weights[:, None] + parts.cumsum(1)).logsumexp(0)
        return float(capital.max()) >= self._log_limit(count)

    def _differences(self, scores: Tensor) -> Tensor:
        if scores.shape != self.scores.shape:
            raise CalibrationError(f"evaluate gives {len(scores)} scores, and {len(self.scores)} for the float model; "
                                   "score the same samples each time, in the same order")
        return self.scores.double() - scores.double()

    def _log_limit(self, count: int) -> float:
        """The logarithm of the capital at which the setting judged as number ``count`` passes."""
        share = FIRST if count == 1 else (1 - FIRST) / (count * (count - 1))
        return -math.log(share * (1 - self.confidence))


def _log_gains(differences: Tensor, drop: float) -> Tensor:
    """The logarithm of what each bet gains by each sample, [bets, samples]."""
    drop = min(drop, 1 - 1e-9)
    bets = torch.arange(1, BETS + 1, dtype=torch.float64) / BETS / (1 - drop)
    return (1 + bets[:, None] * (drop - differences)).clamp(min=0).log()
