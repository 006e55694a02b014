import pytest
from pydantic import ValidationError

from qtk.config.validate import Frozen, Names


class Part(Frozen):
    names: Names = ()


def test_a_single_name_is_a_list_of_one():
    assert Part(names="conv").names == ("conv",)
    assert Part(names=["conv", "linear"]).names == ("conv", "linear")


@pytest.mark.parametrize("given", [{"names": [""]}, {"names": [3]}, {"other": 1}])
def test_what_is_no_name_or_no_key_is_refused(given):
    with pytest.raises(ValidationError):
        Part(**given)


def test_parts_do_not_change():
    with pytest.raises(ValidationError, match="frozen"):
        Part().names = ("conv",)
