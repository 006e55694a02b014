"""The plan of a few models, line by line, as a person read and approved it.

A change of a plan shows up here as a diff. If it is meant, run ``QTK_APPROVE=1 pytest tests/golden`` and read what git
says about it.
"""

import os
from pathlib import Path

import pytest

import qtk
from tests.zoo.models import ZOO

PLANS = Path(__file__).parent / "plans"
CASES = [
    (name, config)
    for name in ("residual", "inverted_residual", "concatenated", "vit", "language_model", "intermediate_outputs")
    for config in ("default", "onnxruntime")
]


@pytest.mark.sample(5)
@pytest.mark.medium
@pytest.mark.parametrize(("name", "config"), CASES)
def test_the_plan_is_the_approved_one(name, config):
    entry = ZOO[name]
    found = f"{qtk.QuantSim(entry.model(), entry.inputs(), config=config, weight_bits=4).plan}\n"
    path = PLANS / f"{name}.{config}.txt"
    if os.environ.get("QTK_APPROVE"):
        path.write_text(found, encoding="utf-8")
    assert found == path.read_text(encoding="utf-8")
