"""Copies of exported files that are cut at their sites, so that each op runs on values that the caller gives.

What reads the value of a site reads an input of the copy in its place, and the copy returns the values that the sites
have before: each is computed from the given values of the sites in front of it alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from qtk.runtimes.model_copy import write_copy
from qtk.runtimes.site_outputs import SiteOutput, load_restored

SUFFIX = "/given"
"""Behind the name of a value that is given."""


def write_cut(file: Path, sites: Sequence[SiteOutput], folder: Path) -> Path:
    """Writes a copy of ``file`` cut at ``sites`` into ``folder``; returns its path.

    The copy has an input more for each site, ``given_name(site)``, and returns the value ``site.name`` of each behind
    the outputs of ``file``.

    Args:
        file: an exported file.
        sites: from ``site_outputs(file, …)``: where it is cut.
        folder: an existing directory, not the directory of ``file``.
    """
    model = load_restored(file)
    ShapeInferencePass()(model)  # the kinds of operators that a runtime fuses depend on shapes
    values = {value.name: value for node in model.graph for value in node.outputs}
    returned = {value.name for value in model.graph.outputs}
    for name in dict.fromkeys(site.name for site in sites):
        value = values[name]
        given = ir.Value(name=f"{name}{SUFFIX}", type=value.type or ir.TensorType(ir.DataType.FLOAT), shape=value.shape)
        for reader, place in tuple(value.uses()):
            reader.replace_input_with(place, given)
        model.graph.inputs.append(given)
        if name not in returned:
            model.graph.outputs.append(value)
    return write_copy(model, file, folder)


def given_name(site: SiteOutput) -> str:
    """The name of the input that gives the value of a site."""
    return f"{site.name}{SUFFIX}"
