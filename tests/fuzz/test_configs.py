"""Configs, recipes and the texts that name schemes, methods and shapes: read as they are meant, or refused in words."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import qtk
from qtk.calibrators.scheme import calibrator, canonical_scheme
from qtk.cli.inspect import parse_shape
from qtk.cli.recipe import Recipe, load_recipe
from qtk.config.files import shipped
from qtk.config.load import load_config
from qtk.layerwise.methods import method
from qtk.workflow.transforms import transform
from tests.fuzz.fuzzing import JUNK, judged, mutated, share, silent

CONFIG = {
    "version": 1,
    "defaults": {"weight": {"symmetric": True, "granularity": "per_channel", "bits": 8}, "activation": {"bits": 8},
                 "bias": "float"},
    "fold_batch_norms": True,
    "rules": [
        {"match": {"op": ["relu", "linear"]}, "output": {"range": [0.0, 6.0], "bits": 8}, "optional": True},
        {"match": {"path": "0"}, "weight": {"dtype": "int4", "granularity": "per_block", "block_size": 4}},
        {"match": {"feeds": ["layer_norm"]}, "output": "float", "optional": True},
    ],
    "supergroups": [["conv", "relu"], ["linear", ["relu", "gelu"]]],
    "io": {"inputs": "quantized", "outputs": "quantized"},
}
AIMET = json.loads((Path(__file__).parents[1] / "config" / "data" / "aimet_npu.json").read_text(encoding="utf-8"))
RECIPE = {
    "models": [{"name": "net", "model": "demo:digits_cnn", "input_shape": [1, 1, 8, 8]}],
    "data": {"calibration": "qtk.demo.digits:calibration", "evaluation": "qtk.demo.digits:evaluation"},
    "config": "default", "scheme": "mse(steps=10)",
    "settings": [{"name": "w8a8", "weight_bits": 8, "activation_bits": None, "transforms": ["smooth_quant(alpha=0.5)"],
                  "layerwise": ["seq_mse", "gptq(damping=0.1)"], "config": {"version": 1}}],
    "evaluation": "top1", "exports": ["encodings", "onnx"], "onnx_for": ["w8a8"], "output": "out", "seed": 3,
}
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 4)).eval()


PREPARED = qtk.prepare_model(net(), X)


@pytest.mark.medium
@given(mutated(CONFIG) | mutated(AIMET) | st.dictionaries(st.text(max_size=8), JUNK, max_size=4))
def test_configs_are_read_or_refused(data):
    config = judged("configs", lambda: load_config(data))
    if config is not None:
        again = judged("configs", lambda: load_config(config.model_dump(mode="json", exclude_none=True)))
        if again is None or again != config:
            silent(f"{config} is stored as {again}")


@share(0.3)
@given(mutated(CONFIG))
def test_what_is_read_plans_and_runs_or_is_refused(data):
    def run() -> object:
        sim = qtk.QuantSim(PREPARED, X, config=data)
        sim.compute_encodings([X], progress=False)
        return sim.model(X)

    result = judged("simulations", run)
    if result is not None and not bool(torch.isfinite(result).all()):
        silent(f"the simulation of finite data by {data} is not finite")


DIGITS = st.text("0123456789-:.eE+xobn_T Z", max_size=12)
SCALAR_TEXTS = st.builds(
    "version: 1\nrules: [{{match: {{op: {}}}, output: {{range: [{} {}, {}]}}}}]\n".format,
    st.sampled_from(["relu", "conv"]),
    st.sampled_from(["", "", "!!int", "!!float", "!!timestamp", "!!bool", "!!binary", "!!set",
                     "!!python/name:os.system"]),
    DIGITS | st.sampled_from(["2026-13-01", "0o9", "9" * 5000, "1e999", ".inf", ".nan", "~", "[" * 60]), DIGITS,
) | st.builds(
    '{{"version": 1, "rules": [{}]}}'.format, st.sampled_from(["9" * 5000, "1e999", "NaN", "-Infinity", "[" * 90])
)
"""Texts of one config with a number, date or tag of any form in it."""


@pytest.mark.sample(1)
@pytest.mark.medium
@pytest.mark.parametrize("suffix", [".yaml", ".json"])
@given(data=mutated(CONFIG) | mutated(AIMET), text=st.none() | st.text(max_size=60) | SCALAR_TEXTS,
       cut=st.integers(0, 400))
def test_files_of_configs_are_read_or_refused(suffix, data, text, cut):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"config{suffix}"
        if text is None:
            try:
                text = (yaml.safe_dump(data) if suffix == ".yaml" else json.dumps(data))
            except (ValueError, UnicodeError):
                return  # an int of more digits than Python writes
            text = text[:-cut] if cut > 200 else text
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        judged("config files", lambda: load_config(path))


@pytest.mark.medium
@given(mutated(RECIPE))
def test_recipes_are_read_or_refused(data):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        try:
            path.write_bytes(yaml.safe_dump(data).encode("utf-8", "surrogatepass"))
        except (ValueError, UnicodeError):
            return
        recipe = judged("recipes", lambda: load_recipe(path))
        assert recipe is None or isinstance(recipe, Recipe)


WORDS = st.sampled_from(["mse", "percentile", "tf_enhanced", "gptq", "seq_mse", "adaround", "smooth_quant", "(", ")",
                         "=", ",", "steps", "norm", "quantile", "damping", "alpha", "num_candidates", "variant", "'v1'",
                         "1e400", "-1", "0.5", "None", "nan", "True", "10**9", "9" * 5000, "[" * 300, "\0"])
SETTINGS = st.lists(WORDS | st.text(max_size=3), max_size=8).map("".join) | st.builds(
    "{}({}={})".format, WORDS, WORDS, WORDS
)


@given(SETTINGS, st.sampled_from([calibrator, canonical_scheme, method, transform, parse_shape, qtk.dtype]))
def test_texts_that_name_things_are_read_or_refused(text, read):
    judged("names", lambda: read(text))


def test_shipped_files_stay_readable():
    assert load_config(shipped("targets", "default")).version == 1
    assert load_config(CONFIG).rules
