"""Loads a float checkpoint of the original model into a simulation whose model was rewritten since."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from qtk.errors import EncodingError
from qtk.graph.insert import QUANTIZERS
from qtk.graph.simulation import Simulation
from qtk.registry import did_you_mean
from qtk.transforms.named_tensors import NamedTensors
from qtk.transforms.steps import State, steps_of

LISTED = 10
"""Findings that an error lists."""


def load_float_state(simulation: Simulation, state: Mapping[str, Tensor]) -> None:
    """Loads the parameters and buffers of the original float model; what transforms did to them is done again.

    >>> import qtk
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)).eval()
    >>> sim = qtk.QuantSim(model, torch.randn(2, 3, 8, 8))
    >>> sim.load_float_state_dict(model.state_dict())

    The values are written into the parameters of the simulation's model; encodings are forgotten, for they belong to
    the weights that were there before.

    Args:
        simulation: changed.
        state: a ``state_dict`` of the float model that the simulation was made from.

    Raises: EncodingError listing every missing, unexpected or misshapen tensor, or naming a frozen encoding; nothing
        has changed then.
    """
    for site, quantizer in simulation.quantizers.items():
        if quantizer.frozen:
            raise EncodingError(f"the encoding of {site} is frozen, and belongs to the weights it has now; "
                                "run sim.unfreeze() first")
    members = NamedTensors(simulation.model)
    names = {key: name for key, tensor in simulation.model.state_dict(keep_vars=True).items()
             if (name := members.name(tensor)) is not None and QUANTIZERS not in key.split(".")}
    rewritten: State = {names.get(key, key): tensor.detach() for key, tensor in state.items()}
    with torch.no_grad():
        try:
            for step in steps_of(simulation.model):
                step.update(rewritten)
        except KeyError as error:
            raise EncodingError(f"the checkpoint has no tensor {error.args[0]!r}; pass a state_dict of the float model "
                                "that the simulation was made from") from None
        expected = {name: members.tensor(name) for name in dict.fromkeys(names.values())}
        findings = list(_findings(rewritten, expected))
        if findings:
            more = f"\n  and {len(findings) - LISTED} more" if len(findings) > LISTED else ""
            raise EncodingError("the checkpoint is of another model:\n  " + "\n  ".join(findings[:LISTED]) + more)
        for name, tensor in expected.items():
            tensor.copy_(rewritten[name])
    for quantizer in simulation.quantizers.values():
        quantizer.drop_encoding()
        quantizer.rewrote_weight, quantizer.original = False, None


def _findings(given: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Iterator[str]:
    for name in sorted(expected.keys() - given.keys()):
        yield f"{name} is missing" + _hint(name, given)
    for name in sorted(given.keys() - expected.keys()):
        yield f"{name} is unexpected" + _hint(name, expected)
    for name in sorted(given.keys() & expected.keys()):
        if given[name].shape != expected[name].shape:
            yield f"{name} has shape {tuple(given[name].shape)}, the model's has {tuple(expected[name].shape)}"


def _hint(name: str, known: Mapping[str, Tensor]) -> str:
    hint = did_you_mean(name, known)
    return f"; {hint}" if hint else ""
