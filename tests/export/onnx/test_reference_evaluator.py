"""onnx's own evaluator, which is written from the standard, agrees with ONNX Runtime without its optimizations."""

import numpy as np
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from qtk.calls.inputs import input_leaves, split_inputs
from qtk.calls.signature import input_names
from qtk.runtimes.session import Optimizations, session_with
from tests.zoo.models import ZOO
from tests.zoo.prepared import simulated, slow_but

CANNOT = {"all_transposed": "onnx's evaluator (seen in 1.23) has no ConvTranspose in groups",
          **dict.fromkeys(("lstm", "recurrent_cells"), "onnx's evaluator has no DynamicQuantizeLSTM")}
"""Model of the zoo → what onnx's evaluator lacks for it."""


@pytest.mark.medium
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", slow_but(
    ZOO, "residual", "inverted_residual", "vit", "masked_fill", "concatenated",
))
def test_it_computes_what_onnxruntime_does(name, tmp_path):
    if name in CANNOT:
        pytest.skip(CANNOT[name])
    entry, sim = ZOO[name], simulated(name, config="onnxruntime")
    sim.export(tmp_path / "out", formats=("onnx",))
    path = tmp_path / "out" / "model.onnx"
    leaves = input_leaves(sim.model.graph, *split_inputs(entry.inputs()))
    feed = {
        name: leaf.numpy() for name, leaf in zip(input_names(sim.model), leaves, strict=True)
        if isinstance(leaf, torch.Tensor)
    }
    session, _ = session_with(path, Optimizations.OFF)
    theirs = ReferenceEvaluator(str(path)).run(None, {port.name: feed[port.name] for port in session.get_inputs()})
    ours = session.run(None, feed)
    scales = [quantizer.scale for quantizer in sim.quantizers.values() if quantizer.scale is not None]
    for mine, other in zip(ours, theirs, strict=True):
        differing = np.abs(mine.astype(np.float64) - other.astype(np.float64)) > 1e-5 * max(np.abs(mine).max(), 1e-3)
        # sums in another order move a value on a rounding edge to the next code now and then
        assert scales
        assert differing.mean() <= 0.02
