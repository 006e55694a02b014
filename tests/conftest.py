"""How the suite runs: thin matrices, no compiled code of other files, and without a GPU Triton's interpreter.

``QTK_EMULATE_GPU=90``: compiled for compute capability 9.0 and run by the emulator of ``tests/ptx`` instead.
"""

import contextlib
import gc
import os
import signal
import sys

import pytest
import torch

from tests import once
from tests.pairwise import full, pairwise

if capability := os.environ.get("QTK_EMULATE_GPU"):
    from tests.ptx import launcher

    launcher.emulate(int(capability))
elif not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # said before anything imports Triton
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell ignores for what runs in the background


def pytest_configure(config):
    gc.set_threshold(50_000, 20, 50)
    folder = once.begin()
    if folder is not None:
        config.add_cleanup(lambda: once.end(folder))


@pytest.fixture(autouse=True, scope="module")
def little_to_collect():
    """Keeps what earlier modules left out of collections, which after thousands of tests take longer than a test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def compiled_anew():
    """torch.compile runs a function uncompiled that it has compiled eight times, for whatever models."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def pytest_generate_tests(metafunc):
    """``@pytest.mark.pairwise(name=values, ...)``: the full matrix wherever slow tests run."""
    marker = metafunc.definition.get_closest_marker("pairwise")
    if marker is not None:
        rows = (full if metafunc.config.getoption("door") == "all" else pairwise)(marker.kwargs.values())
        ids = ["-".join(str(value) for value in row) for row in rows]
        metafunc.parametrize(list(marker.kwargs), rows, ids=ids)


@pytest.fixture(scope="session", autouse=True)
def files_are_not_run(pytestconfig):
    """But behind the door ``all``, and in the tests of that run."""
    from tests.exported_files import not_run  # Triton's interpreter is switched on above

    with contextlib.nullcontext() if pytestconfig.getoption("door") == "all" else not_run():
        yield


@pytest.fixture(scope="session", autouse=True)
def little_warm_up(pytestconfig):
    """But behind the door ``all``: a test asserts that latencies are there, not how long they are."""
    from qtk.runtimes import latency  # Triton's interpreter is switched on above

    with pytest.MonkeyPatch.context() as patch:
        if pytestconfig.getoption("door") != "all":
            patch.setattr(latency, "WARM_UP_S", 0.01)
        yield
