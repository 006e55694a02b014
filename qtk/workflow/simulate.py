"""Makes the simulation of a ``QuantSim`` by its settings: prepares the model, plans it and inserts the quantizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import nn

from qtk.calibrators.scheme import calibrator
from qtk.calls.calls import Call
from qtk.calls.inputs import split_inputs
from qtk.calls.served_sizes import ALL, BATCH, GIVEN, LATE, STATIC
from qtk.calls.states import set_states
from qtk.capture.exclusion import exclude_paths
from qtk.capture.free_shapes import DynamicShapes, shapes_from_json
from qtk.capture.prepared_model import SHAPES, PreparedGraph, PreparedModel
from qtk.config.load import load_config
from qtk.config.schema import QuantConfig, check_op_names, check_schemes
from qtk.core.needs import found_where
from qtk.core.plan import QuantPlan
from qtk.core.site import Site
from qtk.core.width import Width, width_from_json, width_to_json
from qtk.export.free_axes import free_axes
from qtk.graph.graphs import STATES, contents_of, states_of
from qtk.graph.insert import insert
from qtk.graph.simulation import Simulation
from qtk.operators.contents import Trait
from qtk.planning.patterns import RULE_NAMES
from qtk.planning.planner import plan
from qtk.planning.state_pairs import pair_states
from qtk.quantizers.quantizer import Mode
from qtk.torch_private import call_structure
from qtk.transforms.keep_batch_norms import BATCH_NORM, as_folded, settle_batch_norms
from qtk.transforms.split_gates import split_gates
from qtk.transforms.steps import STEPS
from qtk.workflow.prepare import ExampleInputs, prepare_own

WIDTHS = ("weight_bits", "activation_bits")


class Settings(Protocol):
    """What holds the settings of a simulation, as ``QuantSim``."""

    scheme: str
    weight_bits: Width
    activation_bits: Width
    config: QuantConfig
    example_inputs: ExampleInputs
    dynamic_shapes: DynamicShapes


def simulate(
    sim: Settings, model: nn.Module, *, in_place: bool, variants: Sequence[ExampleInputs],
    states: Mapping[str, int | str],
) -> Simulation:
    """Prepares a model, plans it by the settings of ``sim`` and inserts the quantizers, all in SIMULATE.

    Args:
        sim: its settings.
        model: a float model, or a prepared one.
        in_place: share the parameters of ``model`` instead of copying them.
        variants: examples of other kinds of calls.
        states: inputs that are outputs of the call before.

    Raises: CaptureError if the model does not run or cannot be captured; ConfigError, SpecError for unfit settings.
    """
    config, inputs = sim.config, sim.example_inputs
    check_op_names(config, RULE_NAMES)
    check_schemes(config, calibrator)
    prepared = prepare_own(model, inputs, variants, in_place=in_place, dynamic_shapes=sim.dynamic_shapes)
    if config.exclude or prepared.report.excluded:
        exclude_paths(prepared, config.exclude)
    if states:
        set_states(prepared, states)
    found_where({BATCH_NORM}, contents_of(prepared), lambda: settle_batch_norms(
        prepared, Call(*split_inputs(inputs), None), config.fold_batch_norms), None)
    if config.split_gates:
        split_gates(prepared)
    decided = plan_by(sim, prepared, config)
    simulation = Simulation(prepared, decided, insert(prepared, decided), target=config.target)
    for quantizer in simulation.quantizers.values():
        quantizer.mode = Mode.SIMULATE
    return simulation


def plan_by(sim: Settings, prepared: PreparedModel, config: QuantConfig) -> QuantPlan:
    """The plan of a prepared model by a config, and by the widths and the scheme of ``sim``.

    Raises: ConfigError, SpecError for unfit settings.
    """
    folding: AbstractContextManager[dict[Site, str]] = (
        as_folded(prepared) if STEPS in prepared.meta else nullcontext({}))
    with folding as removed_sites:
        decided = plan(prepared, config, weight_bits=sim.weight_bits, activation_bits=sim.activation_bits,
                       scheme=sim.scheme, removed_sites=removed_sites)
    held = contents_of(prepared) | set(prepared.meta)
    return found_where({Trait.WRITES, STATES}, held, lambda: pair_states(decided, prepared), decided)


def settings_to_json(sim: Settings, model: PreparedModel) -> dict[str, object]:
    """The keyword arguments that ``QuantSim`` is to be called with again, on a model that is not prepared."""
    return {
        "scheme": sim.scheme, "config": sim.config.model_dump(mode="json", exclude_none=True),
        **{name: width_to_json(getattr(sim, name)) for name in WIDTHS},
        "dynamic_shapes": _shapes(sim, model), "states": states_of(model),
    }


def _shapes(sim: Settings, model: PreparedModel) -> object:
    """The dynamic shapes that the model was prepared with; explicit ones by the names of its free axes.

    ``"batch"`` in place of explicit ones for inputs inside of containers.
    """
    given = sim.dynamic_shapes if isinstance(sim.dynamic_shapes, str | None) else BATCH
    if not isinstance(model, PreparedGraph):
        return model.meta.get(SHAPES, given)
    sizes = model.sizes
    if sizes.asked != GIVEN:
        return {BATCH: BATCH, ALL: ALL, LATE: ALL, STATIC: None}[sizes.asked]
    axes = {str(node.target): {str(axis): sizes.names.get((str(node.target), axis), str(node.meta["val"].shape[axis]))
                               for axis in free_axes(node)} for node in model.graph.find_nodes(op="placeholder")}
    structure = call_structure(model.graph)
    is_flat = structure is not None and {*axes} <= {*structure.orig_args}
    return {name: lengths for name, lengths in axes.items() if lengths} if is_flat else given


def settings_from_json(stored: Mapping[str, object]) -> dict[str, Any]:
    """The keyword arguments that ``settings_to_json`` wrote; older files have no config and no dynamic shapes.

    Raises: EncodingError, ConfigError if a value is malformed.
    """
    arguments = {name: width_from_json(value) if name in WIDTHS else value for name, value in stored.items()}
    config = load_config(stored.get("config", "default"))  # type: ignore[arg-type]
    shapes = shapes_from_json(arguments.get("dynamic_shapes", BATCH))
    return {**arguments, "dynamic_shapes": shapes, "config": config}
