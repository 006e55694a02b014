import dataclasses
import json

import pytest
import torch
from torch import Tensor

import qtk
from qtk.errors import EncodingError
from qtk.transforms.steps import ScaleParameter, steps_of
from qtk.transforms.steps_json import KINDS, steps_from_json, steps_to_json
from tests.transforms.nets import INTO_LAYERS, INTO_SCALE_SHIFT, randomized


def example_steps():
    steps = [ScaleParameter("0.weight", torch.rand(3, 1, dtype=torch.float64))]
    for build, shape, *_ in (INTO_LAYERS["grouped"], INTO_LAYERS["before_linear"], INTO_SCALE_SHIFT["alone"]):
        prepared = qtk.prepare_model(randomized(build()), torch.randn(shape, dtype=torch.float64))
        qtk.fold_batch_norms(prepared)
        steps += steps_of(prepared)
    return steps


@pytest.mark.medium
def test_what_is_read_is_what_was_written():
    steps = example_steps()
    records, tensors = steps_to_json(steps)
    again = steps_from_json(json.loads(json.dumps(records)), tensors)
    assert len(again) == len(steps)
    for step, read in zip(steps, again, strict=True):
        assert type(step) is type(read)
        for field in dataclasses.fields(step):
            a, b = getattr(step, field.name), getattr(read, field.name)
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
    assert {record["step"] for record in records} <= set(KINDS)


@pytest.mark.medium
@pytest.mark.sample(1)
@pytest.mark.parametrize("spoil", [
    lambda records, tensors: records.append({"step": "unknown"}),
    lambda records, tensors: records.append(5),
    lambda records, tensors: records[1].pop("eps"),
    lambda records, tensors: records[1].update(into="elsewhere"),
    lambda records, tensors: tensors.clear(),
])
def test_malformed_steps_are_named(spoil):
    records, tensors = steps_to_json(example_steps())
    spoil(records, tensors)
    with pytest.raises(EncodingError, match=r"steps\[\d+\]"):
        steps_from_json(records, tensors)
