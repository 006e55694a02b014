import signal
import threading

import pytest

from qtk.layerwise.interrupts import uninterrupted
from tests import fresh


def test_an_interrupt_waits_until_the_body_is_done():
    done = []

    def body():
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("half")
            signal.raise_signal(signal.SIGINT)
            done.append("whole")

    with pytest.raises(KeyboardInterrupt):
        body()
    assert done == ["half", "whole"]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_without_an_interrupt_nothing_happens():
    before = signal.getsignal(signal.SIGINT)
    with uninterrupted():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_are_never_interrupted_anyway():
    ran = []

    def body():
        with uninterrupted():
            ran.append(True)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert ran == [True]


def interrupted_by_the_system():
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with uninterrupted():
        signal.raise_signal(signal.SIGINT)
        print("done", flush=True)
    print("never")


@pytest.mark.medium
def test_the_default_handler_of_the_system_is_let_through():
    shown = fresh.run(interrupted_by_the_system)
    assert shown.stdout == "done\n"
    assert shown.returncode == -signal.SIGINT
