"""Makes silence impossible: is the simulation in the state its plan promises?"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from qtk.core.plan import QuantPlan
from qtk.errors import CheckError, EncodingError
from qtk.graph.graphs import graphs
from qtk.graph.insert import quantizer_nodes, quantizer_target
from qtk.quantizers.quantizer import Mode, Quantizer


def check(model: nn.Module, plan: QuantPlan, quantizers: Mapping[str, Quantizer]) -> None:
    """Looks for every way in which the simulation could do something else than the plan says.

    Raises: CheckError listing all findings: a site whose quantizer is not called in the graph, is switched off, has
        no encoding or a broken one; a range that does not hold the bounds the plan fixed; a rule that matched nothing.
    """
    called = {str(node.target) for module in graphs(model).values() for node in quantizer_nodes(module)}
    findings = [f"{rule} matched nothing; correct it, or mark it `optional: true`" for rule in plan.unmatched_rules]
    for site, decided in plan.items():
        if decided.leader is not None:
            continue
        quantizer = quantizers[site.name]
        problem = _problem(quantizer)
        if quantizer_target(site) not in called:
            problem = "its quantizer is never executed"
        if problem:
            findings.append(f"{site}: {problem}")
    if findings:
        raise CheckError(f"{len(findings)} finding{'s' * (len(findings) > 1)}:\n  " + "\n  ".join(findings))


def _problem(quantizer: Quantizer) -> str | None:
    try:
        encoding = quantizer.encoding
    except EncodingError as error:
        return str(error)
    if not quantizer.ready:
        return "no encoding; run sim.compute_encodings(data)"
    if quantizer.mode is not Mode.SIMULATE:
        return f"mode is {quantizer.mode.name}, so it passes values through"
    if encoding is None:
        return None  # each tensor has its own
    if not bool(torch.isfinite(encoding.minimum).all() & torch.isfinite(encoding.maximum).all()):
        return "its range is not finite"
    return None
