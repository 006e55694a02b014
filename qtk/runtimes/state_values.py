"""The states of a file that takes and returns them as codes, given and read as floats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from qtk.export.onnx.file_states import STATES
from qtk.export.onnx.node_writer import is_integer
from qtk.export.onnx.stored_sites import stored_sites
from qtk.runtimes.site_outputs import SiteOutput


class StateCodes:
    """The states that a file has as codes, by the names of its inputs and outputs; none of most files.

    Args:
        file: an exported file.
    """

    def __init__(self, file: Path) -> None:
        model = ir.load(file)
        states = json.loads(model.metadata_props.get(STATES, "{}"))
        kinds = {value.name: value.dtype for value in model.graph.inputs}
        integers = {name: np.dtype(kind.numpy()) for name in states if is_integer(kind := kinds[name])}
        self._codes: dict[str, SiteOutput] = {}
        encodings = {site.name: site.encoding for site in stored_sites(file)} if integers else {}
        self._dtypes = {name: dtype for name, dtype in integers.items() if states[name]["site"] in encodings}
        for name in self._dtypes:
            for each in (name, states[name]["output"]):
                self._codes[each] = SiteOutput(states[name]["site"], 0, each, encodings[states[name]["site"]])

    def stored(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Inputs by name, as the file takes them, of float ones."""
        return {
            name: torch.from_numpy(self._codes[name].stored(value.detach().cpu()).numpy().astype(self._dtypes[name]))
            if name in self._dtypes else value for name, value in inputs.items()
        }

    def reals(self, output: str, value: Tensor) -> Tensor:
        """Returns what the file returns as an output, in float."""
        return self._codes[output].reals(value) if output in self._codes else value
