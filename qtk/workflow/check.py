"""Checks that every planned quantizer is inserted, enabled, calibrated and finite."""

from __future__ import annotations

import math

import torch
from torch import nn

from qtk.core.encoding import HOST, Encoding, moved
from qtk.errors import CheckError, EncodingError
from qtk.graph.graphs import graphs
from qtk.graph.insert import quantizer_nodes, quantizer_target
from qtk.graph.simulation import Simulation
from qtk.nn.mapped_weights import has_mapped
from qtk.operators.targets import attribute
from qtk.quantizers.modes import read_encodings
from qtk.quantizers.quantizer import Mode, Quantizer


def check(simulation: Simulation) -> None:
    """Checks that every planned quantizer is inserted, enabled, calibrated and finite.

    >>> import qtk
    >>> sim = qtk.QuantSim(torch.nn.Linear(4, 2).eval(), torch.randn(8, 4))
    >>> sim.check()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    qtk.errors.CheckError: ... findings:...

    Raises: CheckError listing all findings: a site whose quantizer is not called in the graph, is disabled, has no
        encoding or a malformed one, or a range that is not finite; a parameter in use that holds NaN, unless
        parameters are mapped from files.
    """
    plan = simulation.plan
    quantizers = {site: simulation.quantizers[site] for site, decided in plan.items() if decided.leader is None}
    encodings = dict(zip(quantizers, read_encodings(list(quantizers.values())), strict=True))
    called = {str(node.target) for module in graphs(simulation.model).values() for node in quantizer_nodes(module)}
    findings = [f"{name}: holds NaN, as weights do after a step of training that diverged; load weights from before it"
                for name in _with_nan(simulation.model)]
    for site, quantizer in quantizers.items():
        problem = _problem(quantizer, encodings[site])
        if quantizer_target(site) not in called:
            problem = "its quantizer is never executed"
        if problem:
            findings.append(f"{site}: {problem}")
    if findings:
        raise CheckError(f"{len(findings)} finding{'s' * (len(findings) > 1)}:\n  " + "\n  ".join(findings))


def _with_nan(model: nn.Module) -> list[str]:
    """The names of parameters that graphs read and that hold NaN; of parts that ranks share nothing is known."""
    read = {id(attribute(graph, str(node.target)))
            for graph in graphs(model).values() for node in graph.graph.find_nodes(op="get_attr")}
    parameters = {} if has_mapped(model) else {
        name: parameter for name, parameter in model.named_parameters()
        if id(parameter) in read and type(parameter) is nn.Parameter and parameter.is_floating_point()
        and parameter.itemsize > 1 and not parameter.is_meta
    }
    sums = moved([parameter.detach().sum(dtype=torch.float32) for parameter in parameters.values()], HOST)  # one wait
    return [name for name, total in zip(parameters, sums, strict=True) if math.isnan(total)]


def _problem(quantizer: Quantizer, encoding: Encoding | EncodingError | None) -> str | None:
    if isinstance(encoding, EncodingError):
        return str(encoding)
    if not quantizer.ready:
        return "no encoding; run sim.compute_encodings(data)"
    if quantizer.mode is not Mode.SIMULATE:
        return f"mode is {quantizer.mode.name}, so it passes values through"
    if encoding is None:
        return None  # each tensor has its own
    if not bool(torch.isfinite(encoding.minimum).all() & torch.isfinite(encoding.maximum).all()):
        return "its range is not finite"
    return None
