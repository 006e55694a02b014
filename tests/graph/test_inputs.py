import pytest
import torch

from qtk.errors import CaptureError
from qtk.graph.inputs import check_inputs, is_free
from qtk.workflow.prepare import prepare_model
from tests.zoo.models import ZOO


def prepared(name, **options):
    return prepare_model(ZOO[name].model(), ZOO[name].inputs(), verify=False, **options)


def test_a_fixed_axis_is_checked_and_the_batch_is_free():
    model = prepared("two_inputs")
    image, vector = ZOO["two_inputs"].inputs(5)
    assert model(image, vector=vector).shape == (5, 4)
    with pytest.raises(CaptureError, match=r"input vector has shape \(5, 7\), the model was captured for \(any, 8\)"):
        model(image, vector[:, :7])
    with pytest.raises(CaptureError, match=r"input image has shape \(5, 3, 8\)"):
        model(image[..., 0], vector)


def test_a_static_batch_is_checked():
    model = prepared("splits", dynamic_shapes=None)
    model(ZOO["splits"].inputs(2))
    with pytest.raises(CaptureError, match=r"has shape \(3, 8\), the model was captured for \(2, 8\)"):
        model(ZOO["splits"].inputs(3))


def test_a_constant_written_into_the_graph_is_checked():
    model = prepared("keyword_input")
    inputs = ZOO["keyword_input"].inputs()
    model(**inputs)
    with pytest.raises(CaptureError, match=r"input scale is 2\.0, and 0\.5 is written into the captured graph"):
        model(**{**inputs, "scale": 2.0})


def test_nested_inputs_are_found_in_any_order_of_their_keys():
    model = prepared("nested_input")
    pair, options, scale, double = ZOO["nested_input"].inputs(3)
    turned = {"nothing": None, "extra": options["extra"]}
    assert torch.equal(model(pair, turned, scale, double), model(pair, options, scale, double))
    with pytest.raises(CaptureError, match="input double is False"):
        model(pair, turned, scale, double=False)


def test_a_call_that_does_not_bind_is_left_to_python():
    model = prepared("two_inputs")
    with pytest.raises(TypeError, match="missing"):
        model()
    check_inputs(model.graph, (), {"unknown": 1})


def test_only_a_size_that_may_vary_is_free():
    assert not is_free(3)
    value = next(iter(prepared("splits").graph.find_nodes(op="placeholder"))).meta["val"]
    assert [is_free(size) for size in value.shape] == [True, False]
