"""The settings of a ``QuantSim``, which it keeps as attributes and ``save`` stores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from qtk.calls.states import states_of
from qtk.capture.free_shapes import DynamicShapes
from qtk.capture.prepared_model import PreparedModel
from qtk.config.load import load_config
from qtk.config.schema import QuantConfig
from qtk.core.width import Width, width_from_json, width_to_json
from qtk.workflow.prepare import ExampleInputs

WIDTHS = ("weight_bits", "activation_bits")


class Settings(Protocol):
    """What holds the settings of a simulation, as ``QuantSim``."""

    scheme: str
    weight_bits: Width
    activation_bits: Width
    config: QuantConfig
    example_inputs: ExampleInputs
    dynamic_shapes: DynamicShapes


def settings_to_json(sim: Settings, model: PreparedModel) -> dict[str, object]:
    """The keyword arguments that ``QuantSim`` is to be called with again; explicit dynamic shapes are left out."""
    shapes = sim.dynamic_shapes
    return {
        "scheme": sim.scheme, "config": sim.config.model_dump(mode="json", exclude_none=True),
        **{name: width_to_json(getattr(sim, name)) for name in WIDTHS},
        "dynamic_shapes": shapes if isinstance(shapes, str | None) else "batch", "states": states_of(model),
    }


def settings_from_json(stored: Mapping[str, object]) -> dict[str, Any]:
    """The keyword arguments that ``settings_to_json`` wrote; older files have no config and no dynamic shapes.

    Raises: EncodingError, ConfigError if a value is malformed.
    """
    arguments = {name: width_from_json(value) if name in WIDTHS else value for name, value in stored.items()}
    config = load_config(stored.get("config", "default"))  # type: ignore[arg-type]
    return {"dynamic_shapes": "batch", **arguments, "config": config}
