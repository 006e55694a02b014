"""The settings of a trial come back from JSON text, and print in the order in which they are applied."""

import json

import pytest

from qtk.auto.choices import Choices

ALL = Choices("mse(steps=20)", ("equalize", "smooth_quant"), ("gptq", "bias_correction"), ("0.fc:out", "ü \"x\""),
              dynamic=True)


@pytest.mark.parametrize("choices", [Choices("min_max"), Choices(""), Choices("mse", precise=("a",)), ALL])
def test_settings_come_back_from_json_text(choices):
    text = json.dumps(choices.to_json())
    assert Choices.from_json(json.loads(text)) == choices
    assert hash(Choices.from_json(json.loads(text))) == hash(choices)


def test_every_field_has_its_key():
    assert ALL.to_json() == {
        "scheme": "mse(steps=20)", "transforms": ["equalize", "smooth_quant"],
        "layerwise": ["gptq", "bias_correction"], "precise": ["0.fc:out", "ü \"x\""],
        "dynamic": True,
    }


@pytest.mark.parametrize("key", ["scheme", "transforms", "layerwise", "precise", "dynamic"])
def test_a_record_without_a_key_is_refused(key):
    record = {name: value for name, value in ALL.to_json().items() if name != key}
    with pytest.raises(KeyError, match=key):
        Choices.from_json(record)


@pytest.mark.parametrize("names", [None, 3])
def test_names_that_are_no_list_are_refused(names):
    with pytest.raises(TypeError):
        Choices.from_json({**ALL.to_json(), "layerwise": names})


@pytest.mark.parametrize(("choices", "text"), [
    (Choices("min_max"), "min_max"),
    (Choices("mse", ("equalize",), ("gptq", "bias_correction")), "mse + equalize + gptq + bias_correction"),
    (Choices("mse", precise=("a", "b", "c")), "mse + 3 sites precise"),
])
def test_they_print_in_the_order_in_which_they_are_applied(choices, text):
    assert str(choices) == text
