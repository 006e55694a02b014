import json
import math

from qtk.report.difference import Difference


def test_numbers_that_json_does_not_have_are_null():
    record = Difference("fc:out", 4, 0.25, None, math.inf, None, math.inf).to_json()
    assert json.loads(json.dumps(record, allow_nan=False)) == {
        "name": "fc:out", "elements": 4, "differing": 0.25, "beyond_one_step": None, "max_difference": None,
        "max_steps": None, "sqnr_db": None, "other_codes": None,
    }
