import pytest
import torch

from qtk.errors import SpecError

launch = pytest.importorskip("qtk.kernels.gpu.launch")
fake_quantize = pytest.importorskip("qtk.kernels.gpu.fake_quantize")
dynamic = pytest.importorskip("qtk.kernels.gpu.fake_quantize_dynamic")
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


class StandIn:
    """For a kernel of the ops: notes what is launched, compiled for it or again."""

    def __init__(self, kernel, launches):
        self.arg_names, self.launches = kernel.arg_names, launches

    def __getitem__(self, grid):
        def compiled_for(*arguments, **constants):
            rest = [constants[name] for name in self.arg_names[len(arguments) :]]
            self.launches.append(((*grid, 1, 1)[:3], [*arguments, *rest]))
            return Again(self.launches)

        return compiled_for


class Again:
    def __init__(self, launches):
        self.launches = launches

    def __getitem__(self, grid):
        return lambda *arguments: self.launches.append((grid, list(arguments)))


def places(launched, tensors):
    """The grid and the arguments of a launch, tensors by their place among those of the call, -1 for others."""
    grid, arguments = launched
    return grid, [
        next((k for k, own in enumerate(tensors) if own is each), -1) if isinstance(each, torch.Tensor) else each
        for each in arguments
    ]


def forward(x, scale, zero_point=None, block_size=(), codes=(-128, 127)):
    result = fake_quantize.fake_quantize(x, scale, zero_point, block_size, *codes)
    return x, result, scale, zero_point


def forward_in_training(x, scale, zero_point=None, block_size=(), codes=(-128, 127)):
    result, kept = fake_quantize.fake_quantize_with_residual(x, scale, zero_point, block_size, *codes, False)
    return x, result, kept, scale, zero_point


def backward(x, scale, zero_point=None, block_size=(), codes=(-128, 127), grad=None):
    grad = torch.ones_like(x) if grad is None else grad
    dx, _, _ = fake_quantize.fake_quantize_backward(grad, x, scale, zero_point, block_size, *codes, False, False)
    return x, grad, dx, scale, zero_point


def backward_of_ranges(x, scale, zero_point=None, block_size=(), codes=(-128, 127), grad=None):
    grad, wants = torch.ones_like(x) if grad is None else grad, (True, zero_point is not None)
    dx, of_scale, of_zero = fake_quantize.fake_quantize_backward(
        grad, x, scale, zero_point, block_size, *codes, *wants)
    return x, grad, dx, scale, zero_point, of_scale, of_zero


CALLS = {
    "first": lambda: (torch.zeros(8, 32), torch.ones(1)),
    "shape": lambda: (torch.zeros(16, 32), torch.ones(1)),
    "dtype": lambda: (torch.zeros(8, 32).bfloat16(), torch.ones(1)),
    "order": lambda: (torch.zeros(32, 8).t(), torch.ones(8), None, (1, -1)),
    "zero points": lambda: (torch.zeros(8, 32), torch.ones(1), torch.zeros(1, dtype=torch.int32)),
    "learned zero points": lambda: (torch.zeros(8, 32), torch.ones(1), torch.zeros(1)),
    "codes": lambda: (torch.zeros(8, 32), torch.ones(1), None, (), (0, 127)),
    "rows": lambda: (torch.zeros(8, 32), torch.ones(8), None, (1, -1)),
    "columns": lambda: (torch.zeros(8, 32), torch.ones(32), None, (-1, 1)),
    "blocks": lambda: (torch.zeros(8, 32), torch.ones(8, 2), None, [1, 16]),
    "rows that begin anywhere": lambda: (torch.zeros(64, 197), torch.ones(64), None, (1, -1)),
    "shared by programs": lambda: (torch.zeros(64, 1024), torch.ones(1)),
}


class TestRepeat:
    """Calls of the ops: what they launch, with their checks and without."""

    @pytest.fixture(autouse=True)
    def launches(self, monkeypatch):
        found = []
        monkeypatch.setattr(launch, "_COMPILED", {})
        monkeypatch.setattr(launch, "_REPEATABLE", {})
        monkeypatch.setattr(fake_quantize, "_SHARED", {})
        for name in ("forward_kernel", "forward_rows_kernel", "backward_kernel", "backward_rows_kernel"):
            monkeypatch.setattr(fake_quantize, name, StandIn(getattr(fake_quantize, name), found))
        monkeypatch.setattr(dynamic, "rows_kernel", StandIn(dynamic.rows_kernel, found))
        return found

    @pytest.mark.parametrize("op", [forward, forward_in_training, backward, backward_of_ranges])
    def test_a_call_like_one_before_launches_the_same_on_its_own_tensors(self, op, launches, monkeypatch):
        expected = []
        for given in CALLS.values():
            tensors = op(*given())
            expected.append(places(launches.pop(), tensors))
        assert not launches
        assert all(-1 not in arguments[:5] for _, arguments in expected)
        monkeypatch.setattr(fake_quantize, "check_range", None)  # nobody may look
        for given, known in zip(CALLS.values(), expected, strict=True):
            tensors = op(*given())
            assert places(launches.pop(), tensors) == known
        assert not launches

    def test_ranges_of_rows_taken_at_run_time(self, launches, monkeypatch):
        calls = [
            (shape, kind, *spec)
            for shape in ((8, 32), (16, 32), (8, 197)) for kind in (torch.float32, torch.bfloat16)
            for spec in ((-128, 127, True), (0, 255, False), (0, 15, False))
        ]

        def launched(shape, kind, *spec):
            x = torch.zeros(shape, dtype=kind)
            tensors = x, *dynamic.fake_quantize_dynamic(x, [1, -1], *spec)
            return places(launches.pop(), tensors)

        expected = [launched(*call) for call in calls]
        assert len(launch._REPEATABLE) == len(calls)
        assert all(arguments[:4] == [0, 1, 2, 3] for _, arguments in expected)
        monkeypatch.setattr(dynamic, "tiling_of", None)  # nobody may look
        assert [launched(*call) for call in calls] == expected
        assert not launches

    def test_calls_that_differ_compile_kernels_of_their_own(self, launches):
        ops = forward, forward_in_training, backward, backward_of_ranges
        for op in ops:
            for given in CALLS.values():
                op(*given())
        assert len(launch._REPEATABLE) == len(ops) * len(CALLS)

    def test_programs_that_share_scales_get_memory_of_their_own_and_the_counters_of_the_stream(self, launches):
        for counters in (launch.tickets(torch.device("cpu"), 1), torch.zeros(4096, dtype=torch.int32)):
            launch._TICKETS[torch.device("cpu"), 0] = counters
            tensors = backward_of_ranges(*CALLS["shared by programs"]())
            grid, arguments = launches.pop()
            parts, of_scale, _, given = arguments[7:11]
            assert (given is counters, of_scale is tensors[5]) == (True, True)
            assert parts.numel() == 2 * grid[0]
            assert not any(parts is each for each in tensors)

    def test_a_call_that_does_not_fit_is_refused_after_one_that_does(self, launches):
        for op in (forward, backward):
            op(torch.zeros(8, 32), torch.ones(8), None, (1, -1))
            with pytest.raises(SpecError):
                op(torch.zeros(8, 32), torch.ones(3), None, (1, -1))
            with pytest.raises(SpecError):
                op(torch.zeros(8, 32), torch.ones(8), None, (-1, 1))
        assert len(launches) == 2

    @pytest.mark.parametrize("op", [forward, backward, backward_of_ranges])
    def test_tensors_at_other_addresses_are_launched_as_what_they_are(self, op, launches):
        rows = torch.ones(8), None, (1, -1)
        op(torch.zeros(8, 32), *rows)
        unaligned = torch.zeros(257)[1:].view(8, 32)
        assert launch.repeat(launch.Call("anything", (unaligned,))) is False
        with_gaps = torch.ones(16)[::2]
        for x, *given in ((unaligned, *rows), (torch.zeros(8, 32), with_gaps, None, (1, -1))):
            before = len(launch._COMPILED), len(launch._REPEATABLE)
            tensors = op(x, *given)
            _, arguments = launches.pop()
            assert arguments[0] is x
            assert len(launch._REPEATABLE) == before[1]
            assert not x.data_ptr() % 16 or len(launch._COMPILED) > before[0]
            assert arguments[1] is tensors[1]
            assert arguments[3].is_contiguous()

    def test_a_gradient_in_another_order_is_copied_each_time(self, launches):
        backward(torch.zeros(8, 32), torch.ones(1))
        for _ in range(2):
            given = torch.zeros(8, 32), torch.ones(1)
            *_, dx, _, _ = backward(*given, grad=torch.ones(32, 8).t())
            _, arguments = launches.pop()
            assert arguments[2] is dx
            assert arguments[1].stride() == given[0].stride()

    def test_one_tensor_in_two_places_is_no_rule_for_the_next_call(self, launches):
        x, numbers = torch.zeros(8, 32), torch.ones(1)
        backward(x, numbers, grad=x)
        forward(x, numbers, numbers)
        launches.clear()
        for op in (backward, forward):
            *tensors, scale, zero = op(torch.zeros(8, 32), torch.ones(1), torch.ones(1) if op is forward else None)
            _, arguments = launches.pop()
            assert all(own is each for own, each in zip(tensors, arguments, strict=False))
            assert arguments[3] is scale
            assert zero is None or arguments[4] is zero

    def test_no_tensor_is_kept(self, launches):
        forward(torch.zeros(8, 32), torch.ones(1))
        ((_, kept),) = launch._REPEATABLE.items()
        assert not [each for each in kept.arguments if isinstance(each, torch.Tensor)]
