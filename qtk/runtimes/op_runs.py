"""Runs each op of an exported file on the reference's own values, and compares what it computes.

Where rounding turns a code in a deep model, every value behind it moves, and the outputs say little of the file. An op
that is given the inputs of the simulation computes the outputs of the simulation, up to codes on the edge of two.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from qtk.analysis.simulated_values import SimulatedValue
from qtk.errors import ExportError
from qtk.report.difference import Difference
from qtk.runtimes.cut_file import given_name, write_cut
from qtk.runtimes.difference_sums import DifferenceSums
from qtk.runtimes.executed_nodes import computing_kinds
from qtk.runtimes.session import Optimizations, session_with
from qtk.runtimes.site_outputs import SiteOutput
from qtk.runtimes.state_values import StateCodes

DTYPES = {
    "tensor(uint8)": torch.uint8, "tensor(int8)": torch.int8, "tensor(uint16)": torch.uint16,
    "tensor(int16)": torch.int16, "tensor(float)": torch.float32,
}
"""Types of the values that are given to an op."""


def op_differences(
    file: Path, sites: Sequence[SiteOutput], inputs: Mapping[str, Tensor], outputs: Sequence[SimulatedValue],
    values: Mapping[tuple[str, int], SimulatedValue], *, optimizations: Optimizations, optimized: Path | None = None,
) -> tuple[Difference, ...]:
    """The difference of each site and output, computed by ONNX Runtime from the reference values of the sites before.

    A site without a reference value, or with one of another shape than in the file, as where channels are padded, is
    computed within the op that reads it.

    Args:
        file: an exported file.
        sites: where it can be cut, in graph order, from ``site_outputs``.
        inputs: the inputs of one call, by name.
        outputs: the reference values of its outputs, in order.
        values: site and step → reference value.
        optimizations: how ONNX Runtime runs the file.
        optimized: the optimized file, where the optimizations are on; the ops must be fused as there.

    Returns: in graph order, then the outputs that are no site.

    Raises: ExportError if ONNX Runtime does not run the file cut like that, or fuses other ops.
    """
    known = [site for site in sites if (site.site, site.step) in values and not site.lengths]
    codes = StateCodes(file)
    inputs = codes.stored(inputs)
    try:
        results = _run(file, known, inputs, values, optimizations, optimized)
        mismatched = [site for site in known if results[site.name].shape != _value(site, values).shape]
        if mismatched:  # moved in the file
            known = [site for site in known if site not in mismatched]
            results = _run(file, known, inputs, values, optimizations, optimized)
    except ExportError:
        raise
    except Exception as error:  # whatever the runtime says
        raise ExportError(f"ONNX Runtime cannot run {file.name} op by op: {error}") from error
    sums: dict[str, DifferenceSums] = {}
    for site in known:
        reference = values[site.site, site.step]
        sums.setdefault(site.site, DifferenceSums(site.site)).add(reference, site.reals(results[site.name]))
    returned = {site.name for site in known}
    for name, reference in zip(results, outputs, strict=False):
        if name not in returned and results[name].shape == reference.value.shape:
            sums.setdefault(name, DifferenceSums(name)).add(reference, codes.reals(name, results[name]))
    return tuple(each.difference() for each in sums.values())


def _value(site: SiteOutput, values: Mapping[tuple[str, int], SimulatedValue]) -> Tensor:
    return values[site.site, site.step].value


def _run(
    file: Path, sites: Sequence[SiteOutput], inputs: Mapping[str, Tensor],
    values: Mapping[tuple[str, int], SimulatedValue], optimizations: Optimizations, optimized: Path | None,
) -> dict[str, Tensor]:
    """The outputs of the file, and the values of ``sites`` as the file has them, by name."""
    with tempfile.TemporaryDirectory(prefix="qtk-", ignore_cleanup_errors=True) as folder:
        copy = Path(folder) / "cut.optimized.onnx"
        session, _ = session_with(
            write_cut(file, sites, Path(folder)), optimizations, optimized_file=None if optimized is None else copy
        )
        if optimized is not None and computing_kinds(copy) != computing_kinds(optimized):
            raise ExportError(f"ONNX Runtime fuses other ops of {file.name} where it is cut")
        kinds = {port.name: port.type for port in session.get_inputs()}
        feed = {name: tensor.detach().cpu().numpy() for name, tensor in inputs.items() if name in kinds}
        for site in sites:
            stored = site.stored(_value(site, values).detach().cpu().float())
            feed[given_name(site)] = stored.to(DTYPES[kinds[given_name(site)]]).numpy()
        names = [port.name for port in session.get_outputs()]
        return {name: torch.from_numpy(array) for name, array in zip(names, session.run(None, feed), strict=True)}
