"""What to try, in the order of what it costs at run time, and among equals of what it costs to try."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from qtk.auto.choices import Choices

TRIED_SCHEMES = ("mse", "tf_enhanced", "activation_mse")
"""Ranges that leave outliers out, searched in one pass over the data, the last with gradients."""

TRIED_TRANSFORMS = ("equalize", "smooth_quant")

CHAINS = (("bias_correction",), ("gptq", "bias_correction"),
          ("seq_mse", "gptq", "coordinate_descent", "bias_correction"))
"""Layer-wise methods, each chain slower than the chain before, and better where weights have few bits."""

FEW_BITS, LEARNED = 4, ("seq_mse", "coordinate_descent", "reconstruction")
"""The width of weights and activations up to which blocks are learned, the slowest step, and its chain."""

MOST_PRECISE = 0.5
"""The largest share of the sites that may stay precise: about as many as all activations, or all weights."""

DYNAMIC = "dynamic quantization"

SAME = 1.1
"""Run times that differ by less are not told apart: estimates are no better."""


def trial_order(
    best: Callable[[], Choices], ranked: Callable[[], Sequence[str]], price: Callable[[Choices], float], *,
    dynamic: bool = False, few_bits: bool = False,
) -> Iterator[tuple[str, Choices]]:
    """Returns what to try next, on top of what is best so far: what takes the same time in the runtime first, then by
    price.

    Args:
        best: the best choices so far.
        ranked: the sites, most costly quantization first; called when nothing cheaper is left.
        price: how long the runtime takes with some choices, over float.
        dynamic: whether the runtime has dynamic quantization, which takes little time to try: first where it runs about
            as long as plain calibration, else in its place by price.
        few_bits: weights and activations have at most ``FEW_BITS``.

    Yields: a step in words, and the choices.

    >>> best = Choices("min_max")
    >>> [step for step, _ in trial_order(lambda: best, lambda: "abcdef", lambda choices: 1.0)]
    ... # doctest: +NORMALIZE_WHITESPACE
    ['ranges by mse', 'ranges by tf_enhanced', 'ranges by activation_mse', 'equalize', 'smooth_quant',
     'bias_correction', 'gptq + bias_correction', 'seq_mse + gptq + coordinate_descent + bias_correction',
     'the worst site precise', 'the 2 worst sites precise', 'the 3 worst sites precise']
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
    sites = ranked()
    most = max(1, int(MOST_PRECISE * len(sites)))
    for count in [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most] if sites else []:
        step = "the worst site precise" if count == 1 else f"the {count} worst sites precise"
        changes[step] = {"precise": tuple(sites[:count])}
    while changes:
        step = min(changes, key=lambda each: price(replace(best(), **changes[each])))
        yield step, replace(best(), **changes.pop(step))
