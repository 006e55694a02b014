"""Checks that every planned quantizer is inserted, enabled, calibrated and finite."""

from __future__ import annotations

import torch

from qtk.core.encoding import Encoding
from qtk.errors import CheckError, EncodingError
from qtk.graph.graphs import graphs
from qtk.graph.insert import quantizer_nodes, quantizer_target
from qtk.graph.simulation import Simulation
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
        encoding or a malformed one, or a range that is not finite.
    """
    plan = simulation.plan
    quantizers = {site: simulation.quantizers[site] for site, decided in plan.items() if decided.leader is None}
    encodings = dict(zip(quantizers, read_encodings(list(quantizers.values())), strict=True))
    called = {str(node.target) for module in graphs(simulation.model).values() for node in quantizer_nodes(module)}
    findings = []
    for site, quantizer in quantizers.items():
        problem = _problem(quantizer, encodings[site])
        if quantizer_target(site) not in called:
            problem = "its quantizer is never executed"
        if problem:
            findings.append(f"{site}: {problem}")
    if findings:
        raise CheckError(f"{len(findings)} finding{'s' * (len(findings) > 1)}:\n  " + "\n  ".join(findings))


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
