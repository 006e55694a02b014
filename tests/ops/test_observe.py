import copy
import gc
import pickle

import pytest
import torch

from qtk.errors import CalibrationError
from qtk.ops import observe
from qtk.ops.observe import Listener


class Recorder:
    def __init__(self):
        self.seen = []

    def observe(self, x):
        if bool((x > 100).any()):
            raise CalibrationError("too large")
        self.seen.append(x.clone())


def listening():
    torch._dynamo.reset()
    listener = Listener("fc:out", Recorder())

    def function(x):
        y = x * 2
        listener.observe_when_run(y)
        return y + 1

    return listener, torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize("grad", [True, False])
def test_compiled_code_shows_every_tensor_once_and_in_order(grad):
    listener, compiled = listening()
    for value in (1.0, 2.0, 3.0):
        assert compiled(torch.full((2,), value, requires_grad=grad)).tolist() == [2 * value + 1] * 2
    assert [seen.tolist() for seen in listener.observer.seen] == [[2.0, 2.0], [4.0, 4.0], [6.0, 6.0]]


def test_a_refusal_reaches_the_caller_with_the_place():
    listener, compiled = listening()
    with pytest.raises(CalibrationError, match="fc:out: too large"):
        compiled(torch.full((2,), 99.0))
    with pytest.raises(CalibrationError, match="fc:out: too large"):
        listener.observe(torch.full((2,), 101.0))


def test_no_observer_is_an_error_with_the_place():
    with pytest.raises(CalibrationError, match=r"fc:out is in OBSERVE but has no observer"):
        Listener("fc:out").observe(torch.ones(1))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda listener: pickle.loads(pickle.dumps(listener))])
def test_a_copy_listens_for_itself(copied):
    listener = Listener("fc:out", Recorder())
    other = copied(listener)
    torch.ops.qtk.observe(other.ticket, torch.ones(2), other.number)
    assert (len(other.observer.seen), len(listener.observer.seen)) == (1, 0)
    assert other.place == "fc:out"


def test_the_address_book_keeps_nothing_alive():
    before = len(observe._ADDRESSES)
    listener = Listener("fc:out", Recorder())
    assert len(observe._ADDRESSES) == before + 1
    del listener
    gc.collect()
    assert len(observe._ADDRESSES) <= before


def test_opcheck():
    listener = Listener("fc:out", Recorder())
    torch.library.opcheck(
        torch.ops.qtk.observe.default, (listener.ticket, torch.ones(3), listener.number),
        test_utils=("test_schema", "test_faketensor"),
    )
