"""Everything that one trial sets; a trial can be repeated from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choices:
    """The settings of a simulation.

    Args:
        scheme: how ranges are found.
        transforms: names of transforms, applied before calibration.
        layerwise: names of layer-wise methods, applied after it.
        precise: sites that are left in more bits, or in float.

    >>> Choices.from_json(Choices("mse", layerwise=("gptq",)).to_json())
    Choices(scheme='mse', transforms=(), layerwise=('gptq',), precise=())
    """

    scheme: str
    transforms: tuple[str, ...] = ()
    layerwise: tuple[str, ...] = ()
    precise: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        return {"scheme": self.scheme, "transforms": list(self.transforms), "layerwise": list(self.layerwise),
                "precise": list(self.precise)}

    @classmethod
    def from_json(cls, record: Mapping[str, object]) -> Choices:
        """Raises: KeyError or TypeError for a record of another kind."""
        names = (record[key] for key in ("transforms", "layerwise", "precise"))
        return cls(str(record["scheme"]), *(tuple(map(str, name)) for name in names))  # type: ignore[call-overload]

    def __str__(self) -> str:
        parts = [self.scheme, *self.transforms, *self.layerwise]
        return " + ".join([*parts, f"{len(self.precise)} sites precise"] if self.precise else parts)
