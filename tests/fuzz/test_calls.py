"""Arguments and batches of every kind: what is asked is done, or refused in words, and then nothing has changed."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import qtk
from tests.fuzz.fuzzing import JUNK, judged, same, share, silent, state

X = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
IDS = torch.zeros(2, 3, dtype=torch.long)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


def lookup() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4)).eval()


PREPARED = qtk.prepare_model(net(), X)
PREPARED_LOOKUP = qtk.prepare_model(lookup(), IDS)


def sim() -> qtk.QuantSim:
    made = qtk.QuantSim(PREPARED, X)
    made.compute_encodings([X], progress=False)
    return made


STRANGE = st.sampled_from([
    None, True, 3, 1.5, float("nan"), float("inf"), -1, 0, 10**400, "3", "", "\0", "a" * 300, b"x", [], {}, (), [3],
    [None], {3: 4}, object(), int, print, numpy.float32(2), numpy.ones(3), torch.ones(2), nn.ReLU(), iter([]),
    Path("x"), range(3), {"a"}, lambda *a, **k: None, slice(3), ..., NotImplemented,
]) | JUNK

CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "QuantSim": (qtk.QuantSim, {"model": PREPARED, "example_inputs": X, "scheme": "min_max", "weight_bits": 8,
                                "activation_bits": 8, "config": "default", "in_place": False}),
    "prepare_model": (qtk.prepare_model, {"model": PREPARED, "example_inputs": X, "dynamic_shapes": "batch",
                                          "modules_to_exclude": (), "verify": False}),
    "compute_encodings": (lambda **k: sim().compute_encodings(**k), {
        "data": [X], "sites": None, "only_missing": False, "forward": None, "num_batches": 1, "progress": False}),
    "set_range": (lambda **k: sim().set_range(**k), {"sites": "1:out", "low": 0.0, "high": 1.0}),
    "freeze": (lambda **k: sim().freeze(**k), {"sites": "1:out"}),
    "unfreeze": (lambda **k: sim().unfreeze(**k), {"sites": None}),
    "forget": (lambda **k: sim().forget(**k), {"sites": ["0.weight"]}),
    "compare": (lambda **k: sim().compare(**k), {"data": [X], "forward": None, "num_batches": 1, "progress": False}),
    "sensitivity": (lambda **k: sim().sensitivity(**k), {
        "data": [X], "loss": None, "top": 1, "groups": None, "forward": None, "num_batches": 1, "progress": False}),
    "export": (lambda **k: sim().export(**k), {
        "directory": "out", "formats": ["encodings"], "force": True, "opset": None}),
    "save": (lambda **k: sim().save(**k), {"directory": "saved", "force": True}),
    "load": (qtk.QuantSim.load, {"directory": "nothing", "model": PREPARED, "example_inputs": X, "in_place": False}),
    "from_checkpoint": (qtk.QuantSim.from_checkpoint, {"folder": "nothing", "example_inputs": X, "model": net,
                                                       "dynamic_shapes": "batch", "verify": False}),
    "quantize_checkpoint": (qtk.quantize_checkpoint, {"folder": "nothing", "directory": "out", "methods": (),
                                                      "data": None, "model": net, "num_batches": 1, "progress": False}),
    "load_float_state_dict": (lambda **k: sim().load_float_state_dict(**k), {"state": net().state_dict()}),
    "apply_layerwise": (lambda **k: qtk.apply_layerwise(sim(), **k), {
        "data": [X], "methods": ["bias_correction"], "sites": None, "forward": None, "num_batches": 1, "valid": None,
        "options": qtk.LayerwiseOptions(), "progress": False}),
    "LayerwiseOptions": (lambda **k: qtk.apply_gptq(sim(), [X], options=qtk.LayerwiseOptions(**k), progress=False), {
        "inputs": "asym", "offload": "none", "checkpoint_dir": None, "holdout": 0.2, "groups": None, "start": None,
        "keep_originals": True, "sparsity": None}),
    "apply_seq_mse": (lambda **k: qtk.apply_seq_mse(sim(), **k), {
        "data": [X], "num_candidates": 3, "refine": False, "joint": False, "exact": False, "loss": "mse",
        "progress": False}),
    "apply_gptq": (lambda **k: qtk.apply_gptq(sim(), **k), {
        "data": [X], "damping": 0.1, "act_order": True, "progress": False}),
    "apply_adaround": (lambda **k: qtk.apply_adaround(sim(), **k), {
        "data": [X], "iterations": 3, "through_activation": False, "progress": False}),
    "apply_reconstruction": (lambda **k: qtk.apply_reconstruction(sim(), **k), {
        "data": [X], "iterations": 3, "window": 1, "progress": False}),
    "equalize_model": (qtk.equalize_model, {"sim": PREPARED}),
    "block_view": (qtk.block_view, {"sim": PREPARED, "blocks": "0", "checkpoint": False}),
    "fold_batch_norms": (qtk.fold_batch_norms, {"prepared_or_sim": PREPARED}),
    "apply_smooth_quant": (lambda **k: qtk.apply_smooth_quant(**{"sim": sim(), **k}), {"data": [X], "alpha": 0.5,
                                                                                     "num_batches": 1}),
    "QuantSpec": (qtk.QuantSpec, {"dtype": qtk.dtype("int8"), "granularity": qtk.PerTensor(), "symmetric": True,
                                  "narrow_range": False, "reduced_range": False, "dynamic": False,
                                  "scale_format": None}),
    "Encoding": (qtk.Encoding, {"spec": qtk.QuantSpec(qtk.dtype("int8"), symmetric=True), "scale": torch.ones(1),
                                "zero_point": None}),
    "PerBlock": (qtk.PerBlock, {"sizes": (1, 4)}),
    "PerChannel": (qtk.PerChannel, {"axis": 0}),
    "Site": (qtk.Site, {"owner": "a", "op": "", "port": "out"}),
    "from_json": (qtk.QuantSpec.from_json, {"data": qtk.QuantSpec(qtk.dtype("int8")).to_json()}),
    "dtype": (qtk.dtype, {"name": "int8"}),
    "SCHEMES": (lambda **k: qtk.SCHEMES[k["name"]], {"name": "mse"}),
} | {
    type(value).__name__: (type(value), {each: getattr(value, each) for each in value.__slots__})
    for registry in (qtk.SCHEMES, qtk.METHODS, qtk.TRANSFORMS) for value in registry.values()
}
HEAVY = {"iterations", "num_candidates", "steps", "bins"}
"""Numbers of steps, whose bounds are others' matter: here at most a few hundred."""


@pytest.mark.medium
@share(2.0)
@given(name=st.sampled_from(sorted(CALLS)), draws=st.data())
def test_a_strange_argument_is_refused_or_makes_sense(name, draws):
    call, arguments = CALLS[name]
    changed = dict(arguments)
    for _ in range(draws.draw(st.integers(1, 2)) if arguments else 0):
        key = draws.draw(st.sampled_from(list(arguments)))
        value = draws.draw(STRANGE)
        if key in HEAVY and isinstance(value, int) and value > 300:
            value = 300
        changed[key] = value
    if draws.draw(st.integers(0, 9)) == 0:
        changed[draws.draw(st.sampled_from(["nonsense", "self", "number"]))] = 3
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            judged("calls", lambda: call(**changed))
        finally:
            os.chdir(here)


DTYPES = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int64,
                          torch.bool, torch.complex64])
SHAPES = st.lists(st.integers(0, 9), max_size=4) | st.sampled_from([[8], [3, 8], [0, 8], [1, 8], [3, 7], [2, 3]])
NUMBERS = st.sampled_from([0.0, 1.0, -1e30, 1e30, float("nan"), float("inf"), -float("inf"), 3e38, 1e-45, 12.0])


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    tensor = torch.full(draw(SHAPES), draw(st.integers(-3, 12)), dtype=torch.float64)
    if tensor.numel() and draw(st.booleans()):
        tensor.view(-1)[draw(st.integers(0, tensor.numel() - 1))] = draw(NUMBERS)
    tensor = tensor.nan_to_num().to(dtype) if not (dtype := draw(DTYPES)).is_floating_point else tensor.to(dtype)
    return tensor.to_sparse() if draw(st.integers(0, 19)) == 0 else tensor


BATCHES = st.lists(
    tensors() | st.tuples(tensors()) | st.fixed_dictionaries({"input": tensors()}) | st.lists(tensors(), max_size=2)
    | JUNK | st.just(X) | st.just(IDS), max_size=3,
)


def _loader(batches: list[object]) -> Any:
    yield from batches
    raise KeyError("no more files")


@pytest.mark.medium
@share(0.5)
@given(model=st.sampled_from(["net", "lookup"]), batches=BATCHES, scheme=st.sampled_from(sorted(qtk.SCHEMES)),
       how=st.sampled_from(["list", "iterator", "broken"]))
def test_strange_batches_are_refused_and_change_nothing_or_calibrate(model, batches, how, scheme):
    prepared, example = (PREPARED, X) if model == "net" else (PREPARED_LOOKUP, IDS)
    made = qtk.QuantSim(prepared, example, scheme=scheme)
    before = state(made)
    data = {"list": batches, "iterator": iter(batches), "broken": _loader(batches)}[how]

    def run() -> bool:
        made.compute_encodings(data, progress=False)
        return True

    if judged("batches", run) is None:
        if not same(before, state(made)):
            silent("a refused calibration changed the simulation")
    elif not all(bool(torch.isfinite(e.scale).all()) for e in made.encodings().values()):
        silent("a scale that is not finite")


@pytest.mark.medium
@share(0.3)
@given(method=st.sampled_from(["seq_mse", "gptq", "bias_correction", "adaround(iterations=2)"]), batches=BATCHES)
def test_strange_batches_are_refused_by_layer_wise_methods_and_change_nothing(method, batches):
    made = sim()
    before = state(made)
    data = list(itertools.islice(batches, 3))
    report = judged("batches of methods", lambda: qtk.apply_layerwise(made, data, method, progress=False))
    if report is None and not same(before, state(made)):
        silent("a refused run changed the simulation")
    if not all(bool(torch.isfinite(value).all()) for value in state(made).values()):
        silent("weights that are not finite")
