"""Encodings to and from AIMET: its own example models, calibrated there and simulated here, and the other way round.

    python -m venv --system-site-packages aimet && aimet/bin/pip install --no-deps aimet-torch
    PYTHONPATH=. aimet/bin/python benchmarks/peers/aimet_encodings.py

AIMET imports more than it needs here (bokeh, cvxpy, holoviews, hvplot, jsonschema, networkx, osqp, pandas, …); pip
names what is missing. For each model and schema: how many encodings were loaded, how many entries ignored, and the
difference of the outputs in steps of the output's scale. The exit code is 1 if one is more than a step.

Backwards, AIMET reads weights from the file of schema 0.6.1 as it is (``set_and_freeze_param_encodings``), and
activations by the modules that make or read them, which this script makes of the same file.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import qtk

logging.disable(logging.WARNING)
warnings.filterwarnings("ignore")

from aimet_torch.batch_norm_fold import fold_all_batch_norms  # noqa: E402  its log is loud while it is imported
from aimet_torch.common import quantsim_config  # noqa: E402
from aimet_torch.examples import test_models  # noqa: E402
from aimet_torch.quantsim import QuantizationSimModel  # noqa: E402

CONFIG = Path(quantsim_config.__file__).parent / "default_config_per_channel.json"
MODELS = ("SingleResidualWithModuleAdd", "SingleResidualWithAvgPool", "TinyModel")
SCHEMAS = (("0.6.1", False), ("1.0.0", False), ("2.0.0", False), ("2.1.0", False), ("1.0.0", True), ("2.1.0", True))
"""Each with whether AIMET exports by ``dynamo=True``, whose names are those of an FX graph."""

FIRST = "conv1"
"""The module of every model here that reads the input."""

INT32_BIASES = ("2.0.0", "2.1.0")
"""The schemas that AIMET writes biases in, which it does not simulate."""


def folded(name: str, x: Tensor) -> nn.Module:
    """An example model with statistics off their defaults, its batch norms folded by AIMET.

    torch exports no adaptive pooling from 7 to 5 pixels; a window of 3 has the same shapes.
    """
    torch.manual_seed(0)
    model = getattr(test_models, name)().eval()
    if hasattr(model, "ada"):
        model.ada = nn.AvgPool2d(3, stride=1)
    for key, buffer in model.named_buffers():
        if key.endswith("running_mean"):
            buffer.normal_(std=0.1)
        elif key.endswith("running_var"):
            buffer.uniform_(0.5, 2.0)
    fold_all_batch_norms(model, tuple(x.shape), dummy_input=x)
    return model


def aimet_simulation(model: nn.Module, x: Tensor) -> QuantizationSimModel:
    return QuantizationSimModel(model, x, default_param_bw=8, default_output_bw=8, config_file=str(CONFIG))


def qtk_simulation(model: nn.Module, x: Tensor) -> qtk.QuantSim:
    return qtk.QuantSim(model, x, weight_bits=8, activation_bits=8, config=CONFIG)


def difference(ours: qtk.QuantSim, theirs: QuantizationSimModel, x: Tensor) -> tuple[float, float]:
    """The largest difference of outputs in steps of the output's scale, and the share of outputs that differ."""
    with torch.no_grad():
        left, right = ours.model(x), theirs.model(x)
    step = list(ours.encodings().values())[-1].scale.item()
    apart = (left - right).abs() / step
    return apart.max().item(), (apart > 0.5).double().mean().item()


def by_module(file: Path, sim: qtk.QuantSim) -> dict[str, object]:
    """The content of a file of schema 0.6.1, activations by module instead of by tensor."""
    from qtk.aimet.tensor_names import tensor_names

    data, sites = json.loads(file.read_text(encoding="utf-8")), tensor_names(sim.model)
    activations: dict[str, dict[str, dict[str, object]]] = defaultdict(lambda: defaultdict(dict))
    for name, (record,) in data["activation_encodings"].items():
        module, _, port = sites[name].rpartition(":")
        if port == "input":  # AIMET quantizes it at the first module that reads it
            activations[FIRST]["input"]["0"] = record
        else:
            activations[module]["output"]["0"] = record
    return {**data, "activation_encodings": activations}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    arguments = parser.parse_args()
    table, worst = Table("model", "from", "to", "schema", "loaded", "ignored", "steps apart", "% of outputs apart"), 0.0
    for name in arguments.models:
        torch.manual_seed(1)
        batches = [torch.randn(8, 3, 32, 32) for _ in range(4)]
        x = torch.randn(64, 3, 32, 32)
        model = folded(name, batches[0])
        theirs = aimet_simulation(model, batches[0])
        theirs.compute_encodings(lambda each, _, batches=batches: [each(batch) for batch in batches], None)
        with tempfile.TemporaryDirectory() as folder:
            for schema, dynamo in SCHEMAS:
                file = Path(folder) / f"{schema} {dynamo}.onnx"
                theirs.onnx.export((batches[0],), str(file), encoding_version=schema, input_names=["image"],
                                   output_names=["logits"], dynamo=dynamo)
                ours = qtk_simulation(model, batches[0])
                result = ours.load_encodings(file.with_suffix(".encodings"), strict=schema not in INT32_BIASES)
                steps, apart = difference(ours, theirs, x)
                worst = max(worst, steps)
                table.add_row(name, "AIMET", "qtk", schema + " dynamo" * dynamo, str(len(result.loaded)),
                              str(len(result.ignored)), f"{steps:.3f}", f"{100 * apart:.2f}")
            ours = qtk_simulation(model, batches[0])
            ours.compute_encodings([3 * batch for batch in batches], progress=False)
            ours.export(Path(folder) / "qtk", formats="encodings_aimet_0.6.1")
            file = Path(folder) / "qtk" / "encodings_aimet_0.6.1.json"
            fresh = aimet_simulation(model, batches[0])
            fresh.set_and_freeze_param_encodings(str(file))
            fresh.load_encodings(by_module(file, ours), strict=True, partial=False, allow_overwrite=False)
            steps, apart = difference(ours, fresh, x)
            worst = max(worst, steps)
            table.add_row(name, "qtk", "AIMET", "0.6.1", str(len(ours.encodings())), "0", f"{steps:.3f}",
                          f"{100 * apart:.2f}")
    Console().print(table)
    sys.exit(worst > 1.001)  # a step is a difference of two rounded numbers


if __name__ == "__main__":
    main()
