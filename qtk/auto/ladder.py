"""What to try, in the order of its cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from qtk.auto.choices import Choices

TRIED_SCHEMES = ("mse", "tf_enhanced", "activation_mse")
"""Ranges that leave outliers out, searched in one pass over the data, the last with gradients."""

TRIED_TRANSFORMS = ("equalize", "smooth_quant")

CHAINS = (("bias_correction",), ("gptq", "bias_correction"),
          ("seq_mse", "gptq", "coordinate_descent", "bias_correction"))
"""Layer-wise methods, each chain slower than the one before, and better where weights have few bits."""

FEW_BITS, LEARNED = 4, ("seq_mse", "coordinate_descent", "reconstruction")
"""The width of weights and activations up to which blocks are learned, the slowest step, and its chain."""

MOST_PRECISE = 0.5
"""The largest share of the sites that may stay precise: about as many as all activations, or all weights."""


DYNAMIC = "dynamic quantization"


def ladder(
    best: Callable[[], Choices], ranked: Callable[[], Sequence[str]], dynamic: Callable[[], bool] | None = None, *,
    few_bits: bool = False,
) -> Iterator[tuple[str, Choices]]:
    """What to try next, on top of what is best so far.

    Args:
        best: the best choices so far.
        ranked: the sites, the one whose quantization costs most first; called when nothing cheaper is left.
        dynamic: whether what is computed in integers stays so with dynamic quantization, which is then tried first,
            and else when nothing but precise sites is left; ``None``: the runtime has none.
        few_bits: weights and activations have at most ``FEW_BITS``.

    Yields: a step in words, and the choices.

    >>> best = Choices("min_max")
    >>> [step for step, _ in ladder(lambda: best, lambda: "abcdef")]  # doctest: +NORMALIZE_WHITESPACE
    ['ranges by mse', 'ranges by tf_enhanced', 'ranges by activation_mse', 'equalize', 'smooth_quant',
     'bias_correction', 'gptq + bias_correction', 'seq_mse + gptq + coordinate_descent + bias_correction',
     'the worst site precise', 'the 2 worst sites precise', 'the 3 worst sites precise']
    """
    is_early = dynamic is not None and dynamic()
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
    if dynamic is not None and not is_early:
        yield DYNAMIC, replace(best(), dynamic=True)
    sites = ranked()
    most = max(1, int(MOST_PRECISE * len(sites)))
    for count in [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most] if sites else []:
        step = "the worst site precise" if count == 1 else f"the {count} worst sites precise"
        yield step, replace(best(), precise=tuple(sites[:count]))
