"""Small floats by their definition, independent of the code under test."""

import itertools
import math


def numbers(format):
    """Every finite number that is not negative, from the definition of sign, exponent and mantissa."""
    bias = (1 << (format.exponent_bits - 1)) - 1
    found = []
    for exponent, mantissa in itertools.product(range(1 << format.exponent_bits), range(1 << format.mantissa_bits)):
        fraction = mantissa / (1 << format.mantissa_bits)
        found.append(math.ldexp(fraction, 1 - bias) if exponent == 0 else math.ldexp(1 + fraction, exponent - bias))
    return [number for number in found if number <= format.largest]


def nearest(value, format):
    """The number of the format that is nearest in exact arithmetic, the even mantissa at ties."""
    grid = numbers(format)
    distance = [abs(abs(value) - number) for number in grid]
    ties = [index for index, each in enumerate(distance) if each == min(distance)]
    index = ties[0] if len(ties) == 1 else next(tie for tie in ties if tie % 2 == 0)
    return math.copysign(grid[index], value)
