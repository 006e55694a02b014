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
        precise: sites that are left in more bits, or in float, and layers of recurrent nets that compute in float.
        dynamic: activations are quantized at run time.

    >>> Choices.from_json(Choices("mse", layerwise=("gptq",)).to_json())
    Choices(scheme='mse', transforms=(), layerwise=('gptq',), precise=(), dynamic=False)
    """

    scheme: str
    transforms: tuple[str, ...] = ()
    layerwise: tuple[str, ...] = ()
    precise: tuple[str, ...] = ()
    dynamic: bool = False

    def to_json(self) -> dict[str, object]:
        return {"scheme": self.scheme, "transforms": list(self.transforms), "layerwise": list(self.layerwise),
                "precise": list(self.precise), "dynamic": self.dynamic}

    @classmethod
    def from_json(cls, record: Mapping[str, object]) -> Choices:
        """Raises: KeyError or TypeError for a record of another kind."""
        transforms, layerwise, precise = (
            tuple(map(str, record[key])) for key in ("transforms", "layerwise", "precise")  # type: ignore[call-overload]
        )
        return cls(str(record["scheme"]), transforms, layerwise, precise, bool(record["dynamic"]))

    def __str__(self) -> str:
        parts = [self.scheme, *(["dynamic quantization"] if self.dynamic else []), *self.transforms, *self.layerwise]
        return " + ".join([*parts, f"{len(self.precise)} sites precise"] if self.precise else parts)
