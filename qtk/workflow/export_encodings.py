"""Writes the encodings of a simulation as JSON, and beside AIMET's schemas the float model with the same names."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from qtk.aimet import encodings_aimet as schemas
from qtk.aimet.fields import NamedEncoding
from qtk.aimet.named_encodings import named_encodings
from qtk.aimet.tensor_names import tensor_names
from qtk.calls.inputs import ExampleInputs
from qtk.capture.exclusion import excluded_modules
from qtk.core.encoding import Encoding
from qtk.core.granularity import PerTokenBlock
from qtk.core.site import Site
from qtk.core.spec import QuantSpec
from qtk.errors import ExportError
from qtk.export import encodings_json as own_json
from qtk.export.simulated_sites import compare_encodings
from qtk.export.site_roles import parameter_roles
from qtk.graph.simulation import Simulation
from qtk.report.stages import Stages
from qtk.workflow.exported_graphs import graph_calls, onnx_name, read_back

ENCODINGS_FILE = "encodings.json"
FLOAT_FOLDER = "float"
"""Directory of the float ONNX files, which have the names of the files with QuantizeLinear."""


def aimet_name(version: str) -> str:
    """File name of the encodings in a schema of AIMET.

    >>> aimet_name("1.0.0")
    'encodings_aimet_1.0.0.json'
    """
    return f"encodings_aimet_{version}.json"


def encodings(simulation: Simulation, example_inputs: ExampleInputs, folder: Path, stages: Stages) -> None:
    """Writes qtk's encodings JSON, and AIMET's schemas in use where they can represent the model."""
    encodings_json(simulation, example_inputs, folder, stages)
    for version in ("1.0.0", "2.0.0"):
        try:
            tensors = _write_aimet(version, simulation, folder)
        except ExportError as error:
            warnings.warn(f"skipped {aimet_name(version)}: {error}", stacklevel=2)
        else:
            _compare_aimet(version, tensors, folder)


def encodings_json(simulation: Simulation, example_inputs: ExampleInputs, folder: Path, stages: Stages) -> None:
    """Writes qtk's encodings JSON. Raises: ExportError if they differ as read."""
    stages.begin(ENCODINGS_FILE)
    path, dynamic = folder / ENCODINGS_FILE, _dynamic(simulation)
    encodings = {site.name: encoding for site, encoding in _calibrated(simulation).items()}
    masked = {site.name: reason for site, reason in simulation.dropped.items()}
    parameters = parameter_roles(simulation)
    own_json.export(encodings, path, parameters=parameters, dynamic=dynamic, masked=masked,
                    target=simulation.target)
    with read_back(path):
        stored = own_json.parse(own_json.load_object(path), path.name)
        compare_encodings(stored.encodings, encodings)
        if (stored.dynamic, stored.masked, stored.parameters) != (dynamic, masked, parameters):
            raise ExportError("the sites of parameters, of dynamic quantization, or with masks, differ from the "
                              "simulation")


def encodings_aimet(
    version: str, simulation: Simulation, example_inputs: ExampleInputs, folder: Path, stages: Stages
) -> None:
    """Writes the encodings in a schema of AIMET. Raises: ExportError if it cannot hold them, or they differ as read."""
    stages.begin(aimet_name(version))
    _compare_aimet(version, _write_aimet(version, simulation, folder), folder)


def _write_aimet(version: str, simulation: Simulation, folder: Path) -> list[NamedEncoding]:
    """Writes the encodings in a schema of AIMET, by the names of the tensors in the float ONNX file."""
    found_late = [site.name for site, each in simulation.quantizers.items()
                  if each.spec.dynamic or isinstance(each.spec.granularity, PerTokenBlock)]
    if found_late:
        raise ExportError(f"AIMET's schemas hold no dynamic quantization ({found_late[0]}); {ENCODINGS_FILE} lists it")
    tensors = named_encodings(simulation)
    write = schemas.WRITERS[version]
    write(tensors, folder / aimet_name(version), excluded=excluded_modules(simulation.model))
    return tensors


def _compare_aimet(version: str, tensors: Sequence[NamedEncoding], folder: Path) -> None:
    specs = {each.name: each.encoding.spec for each in tensors}
    shapes = {each.name: each.shape for each in tensors if each.shape is not None}
    path = folder / aimet_name(version)
    with read_back(path):
        compare_encodings(schemas.read(path, specs, shapes=shapes),
                          {each.name: each.encoding for each in tensors})


def aimet(version: str, simulation: Simulation, example_inputs: ExampleInputs, folder: Path, stages: Stages) -> None:
    """Writes what AIMET's converters take: the encodings, and the float model with the same names."""
    encodings_aimet(version, simulation, example_inputs, folder, stages)
    stages.begin(f"{FLOAT_FOLDER}/{onnx_name('')}")
    _float_onnx(simulation, example_inputs, folder)


def _float_onnx(simulation: Simulation, example_inputs: ExampleInputs, folder: Path) -> None:
    if (folder / FLOAT_FOLDER).is_dir():  # by another schema
        return
    try:
        from qtk.export.onnx import float_graph  # loaded here: onnx is an extra, and slow to import
    except ImportError as error:
        raise ExportError(f"a float ONNX file needs the package {error.name}; pip install 'qtk[onnx]'") from error
    (folder / FLOAT_FOLDER).mkdir()
    names, found = tensor_names(simulation.model), set[str]()
    for path, (graph, call) in graph_calls(simulation.model, example_inputs).items():
        file = folder / FLOAT_FOLDER / onnx_name(path)
        float_graph.export(graph, call, file, names)
        found |= float_graph.read_names(file)
    missing = next((name for name in names if name not in found), None)
    if missing is not None:
        raise ExportError(f"{missing} is quantized, and in no float ONNX file: no graph that the example inputs run "
                          "has it; prepare the model with other example inputs")


def _calibrated(simulation: Simulation) -> dict[Site, Encoding]:
    quantizers = simulation.quantizers.items()
    return {site: encoding for site, quantizer in quantizers if (encoding := quantizer.encoding) is not None}


def _dynamic(simulation: Simulation) -> dict[str, QuantSpec]:
    return {site.name: each.spec for site, each in simulation.quantizers.items() if each.spec.dynamic}
