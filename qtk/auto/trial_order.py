"""What to try, in the order of what it costs at run time, and among equals of what it costs to try."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from qtk.auto.choices import Choices
from qtk.auto.ranking import Ranking

TRIED_SCHEMES = ("mse", "tf_enhanced", "activation_mse")
"""Ranges that leave outliers out, searched in one pass over the data, the last with gradients."""

TRIED_TRANSFORMS = ("equalize", "smooth_quant")

CHAINS = (("bias_correction",), ("gptq", "bias_correction"),
          ("seq_mse", "gptq", "coordinate_descent", "bias_correction"))
"""Layer-wise methods, each chain slower than the chain before, and better where weights have few bits."""

FEW_BITS, LEARNED = 4, ("seq_mse", "coordinate_descent", "reconstruction")
"""The width of weights and activations up to which blocks are learned, the slowest step, and its chain."""

DYNAMIC = "dynamic quantization"

SAME = 1.1
"""Run times that differ by less are not told apart: estimates are no better."""


def trial_order(
    best: Callable[[], Choices], ranked: Callable[[], Ranking], price: Callable[[Choices], float], *,
    dynamic: bool = False, few_bits: bool = False,
) -> Iterator[tuple[str, Choices]]:
    """Returns what to try next, on top of what is best so far: what takes the same time in the runtime first, then by
    price.

    Args:
        best: the best choices so far.
        ranked: the sites that can be left precise, with the best choices; called when nothing cheaper is left.
        price: how long the runtime takes with some choices, over float.
        dynamic: whether the runtime has dynamic quantization, which takes little time to try: first where it runs about
            as long as plain calibration, else in its place by price.
        few_bits: weights and activations have at most ``FEW_BITS``.

    Yields: a step in words, and the choices.

    >>> best, ranking = Choices("min_max"), Ranking(tuple("abcdef"), dict(zip("abcdef", [9, 3, 0.7, 0.2, 0.1, 0.01])))
    >>> [step for step, _ in trial_order(lambda: best, lambda: ranking, lambda choices: 1.0)]
    ... # doctest: +NORMALIZE_WHITESPACE
    ['ranges by mse', 'ranges by tf_enhanced', 'ranges by activation_mse', 'equalize', 'smooth_quant',
     'bias_correction', 'gptq + bias_correction', 'seq_mse + gptq + coordinate_descent + bias_correction',
     'the worst site precise', 'the 2 worst sites precise', 'the 3 worst sites precise',
     'the 4 sites precise that lose most alone', 'the 5 sites precise that lose most alone']
    """
    is_early = dynamic and price(replace(best(), dynamic=True)) <= SAME * price(best())
    if is_early:
        yield DYNAMIC, replace(best(), dynamic=True)
    for scheme in TRIED_SCHEMES:
        if scheme != best().scheme:
            yield f"ranges by {scheme}", replace(best(), scheme=scheme)
    for name in TRIED_TRANSFORMS:
        yield name, replace(best(), transforms=(*best().transforms, name))
    if best().transforms:  # which leave other ranges
        for scheme in TRIED_SCHEMES:
            if scheme != best().scheme:
                yield f"ranges by {scheme}, after that", replace(best(), scheme=scheme)
    for chain in (*CHAINS, LEARNED) if few_bits else CHAINS:
        yield " + ".join(chain), replace(best(), layerwise=chain)
    changes: dict[str, dict[str, Any]] = {}
    if dynamic and not is_early:
        changes[DYNAMIC] = {"dynamic": True}
    tried = ranked().by_recovery()
    for sites in tried:
        step = "the worst site precise" if len(sites) == 1 else f"the {len(sites)} worst sites precise"
        changes[step] = {"precise": sites}
    while changes:
        step = min(changes, key=lambda each: price(replace(best(), **changes[each])))
        yield step, replace(best(), **changes.pop(step))
    left = [sites for sites in ranked().by_increase() if set(sites) not in map(set, tried)]
    while left:
        prices = [price(replace(best(), precise=sites)) for sites in left]
        index = next(index for index, each in enumerate(prices) if each <= SAME * min(prices))  # the fewest sites
        sites = left.pop(index)
        step = "the site precise that loses most alone" if len(sites) == 1 else (
            f"the {len(sites)} sites precise that lose most alone")
        yield step, replace(best(), precise=sites)
