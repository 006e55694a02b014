import pytest
import torch

launch = pytest.importorskip("qtk.kernels.gpu.launch")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_tickets_are_zero_shared_and_grow():
    few = launch.tickets(DEVICE, 3)
    assert few.numel() >= 3
    assert launch.tickets(DEVICE, few.numel()) is few
    more = launch.tickets(DEVICE, few.numel() + 1)
    assert more.numel() > few.numel()
    assert (more.dtype, bool(more.any())) == (torch.int32, False)
    assert launch.tickets(DEVICE, 1) is more


def test_a_grid_has_programs_and_the_launch_a_device():
    assert launch.programs(DEVICE) >= 1
    with launch.on_device_of(torch.zeros(1, device=DEVICE)):
        assert DEVICE.type == "cpu" or torch.cuda.current_device() == torch.zeros(1, device=DEVICE).device.index


class Compiled:
    """Stands for a compiled kernel."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *arguments: self.launches.append((grid, *arguments))


class Kernel:
    """Stands for a kernel of Triton; it notes what it was asked to compile for."""

    arg_names = ("x_at", "y_at", "count", "FIRST", "SECOND")

    def __init__(self, compiles=True):
        self.compiles = compiles
        self.made = []

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.made.append((grid, arguments, constants))
            return Compiled() if self.compiles else None

        return launch


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launch, "_COMPILED", {})
    return Kernel()


def test_a_launch_like_one_before_takes_what_that_compiled(kernel):
    x, y = torch.zeros(8), torch.zeros(8)
    launch.run(kernel, (3,), x, y, 5, SECOND=2, FIRST=1, num_warps=4)
    assert kernel.made == [((3,), (x, y, 5), {"SECOND": 2, "FIRST": 1, "num_warps": 4, **launch.EXACTLY})]
    other = torch.ones(8)
    launch.run(kernel, (4, 2), other, y, 5, SECOND=2, FIRST=1, num_warps=4)  # a grid is no part of the code
    assert len(kernel.made) == 1
    ((compiled, _),) = launch._COMPILED.values()
    ((grid, *arguments),) = compiled.launches
    assert grid == (4, 2, 1)
    assert arguments[0] is other
    assert arguments[2:] == [5, 1, 2]  # in the order of the kernel's arguments, options left out


def test_whatever_a_kernel_is_specialized_for_compiles_another(kernel):
    x, y = torch.zeros(8), torch.zeros(8)
    unaligned = torch.zeros(9)[1:]
    first = {"FIRST": 1, "SECOND": 2, "num_warps": 4}
    calls = [
        ((x, y, 5), first), ((x.double(), y, 5), first), ((x, y.half(), 5), first), ((unaligned, y, 5), first),
        ((x, unaligned, 5), first), ((x, y, 6), first), ((x, y, 5), {**first, "SECOND": 1}),
        ((x, y, 5), {**first, "num_warps": 8}), ((x, y, 5), {"SECOND": 1, "FIRST": 2, "num_warps": 4}),
    ]
    for _ in range(2):
        for arguments, constants in calls:
            launch.run(kernel, (1,), *arguments, **constants)
    assert len(kernel.made) == len(calls)
    another = Kernel()
    launch.run(another, (1,), x, y, 5, **first)
    assert len(another.made) == 1


def test_what_compiles_nothing_is_asked_each_time(monkeypatch):
    monkeypatch.setattr(launch, "_COMPILED", {})
    kernel, x = Kernel(compiles=False), torch.zeros(8)
    for _ in range(3):
        launch.run(kernel, (1,), x, x, 5, FIRST=1, SECOND=2)
    assert len(kernel.made) == 3


def test_no_more_are_kept_than_a_limit(kernel, monkeypatch):
    monkeypatch.setattr(launch, "MOST_KEPT", 4)
    x = torch.zeros(8)
    for count in range(11):
        launch.run(kernel, (1,), x, x, count, FIRST=1, SECOND=2)
    assert len(launch._COMPILED) <= 4
