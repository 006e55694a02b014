import json

import pytest

from qtk.core.width import FROM_CONFIG, width_from_json, width_to_json
from qtk.errors import EncodingError


@pytest.mark.parametrize("width", [8, 4, None, FROM_CONFIG])
def test_a_width_survives_json(width):
    assert width_from_json(json.loads(json.dumps(width_to_json(width)))) is width


@pytest.mark.parametrize("value", ["config", 8.0, True, [8]])
def test_what_is_no_width_is_refused(value):
    with pytest.raises(EncodingError, match="not a width"):
        width_from_json(value)
