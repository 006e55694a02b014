"""Compares the encodings in a file with those of the simulation it was written from."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from qtk.core.encoding import Encoding
from qtk.errors import ExportError

CPU = torch.device("cpu")


def compare_encodings(stored: Mapping[str, Encoding], simulated: Mapping[str, Encoding]) -> None:
    """Checks that both hold the same sites with bit-equal encodings.

    Raises: ExportError naming the first site that differs.
    """
    for site in [*simulated, *stored]:
        if site not in stored:
            raise ExportError(f"{site} is missing in the file")
        if site not in simulated:
            raise ExportError(f"{site} is not quantized in the simulation")
        compare_encoding(site, stored[site], simulated[site])


def compare_encoding(site: str, stored: Encoding, simulated: Encoding) -> None:
    """Checks that the encodings are bit-equal. Raises: ExportError naming the site if not."""
    simulated = simulated.to(CPU)
    if not stored.equals(simulated):
        raise ExportError(f"{site}: {_difference(stored, simulated)}")


def _difference(stored: Encoding, simulated: Encoding) -> str:
    """Describes the first difference: spec, shape or number.

    >>> from qtk.core.dtypes import dtype
    >>> from qtk.core.spec import QuantSpec
    >>> spec = QuantSpec(dtype("int8"), symmetric=True)
    >>> _difference(Encoding(spec, torch.tensor([0.5])), Encoding(spec, torch.tensor([0.25])))
    'scale[0] is 0.5 in the file and 0.25 in the simulation'
    """
    if stored.spec != simulated.spec:
        return f"{stored.spec} in the file and {simulated.spec} in the simulation"
    if stored.scale.shape != simulated.scale.shape:
        shapes = tuple(stored.scale.shape), tuple(simulated.scale.shape)
        return "scales of shape {} in the file and {} in the simulation".format(*shapes)
    name, in_file, in_simulation = "scale", stored.scale, simulated.scale
    if torch.equal(in_file, in_simulation):
        assert stored.zero_point is not None
        assert simulated.zero_point is not None
        name, in_file, in_simulation = "zero_point", stored.zero_point, simulated.zero_point
    index = tuple((in_file != in_simulation).nonzero()[0].tolist())
    entry = f"{name}[{', '.join(map(str, index))}]"
    return f"{entry} is {in_file[index].item()} in the file and {in_simulation[index].item()} in the simulation"
