"""Times fake-quantization against the memory-bandwidth limit, and against other implementations.

Each figure is a multiple of ``torch.Tensor.copy_`` of the same tensor, timed in the same turn; medians over the turns.
A forward reads and writes each element once, as the copy does; a backward reads two tensors and writes one, so that
its floor is 1.5 copies. ``clone`` is the copy with its allocation, which the others pay too. Nothing is timed that does
not first compute what the reference does: codes exactly where the definition is the same, within one step elsewhere.

    python benchmarks/kernels/bench_fake_quantize.py --csv kernels.csv        # on a GPU too, where there is one
    python benchmarks/kernels/bench_fake_quantize.py --device cpu --sizes 2.4 --threads 1
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))

from turns import Given, Setting, Timed, arguments, finish, multiples

from qtk.numerics import affine
from qtk.ops.decomposed import FakeQuantize
from qtk.ops.fake_quantize import fake_quantize

WIDTH = 1536
SIZES = {"cpu": (0.00026, 0.016, 2.4, 64), "cuda": (0.016, 0.26, 2.4, 67, 268, 1074)}  # in million elements
GRANULARITIES = ("tensor", "channel", "channel_last", "block")
CODES = (-128, 127)
Quantize = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One tensor and its scales."""

    device: str
    kind: str
    granularity: str
    elements: int

    def tensors(self) -> tuple[Tensor, Tensor]:
        width = min(WIDTH, self.elements)
        x = torch.randn(self.elements // width, width, device=self.device).to(getattr(torch, self.kind))
        count = {"tensor": (1,), "channel": (x.shape[0],), "channel_last": (width,), "block": (x.shape[0], width // 32)}
        return x, torch.rand(count[self.granularity], device=self.device) * 0.01 + 0.02

    @property
    def block_size(self) -> tuple[int, ...]:
        return {"tensor": (), "channel": (1, -1), "channel_last": (-1, 1), "block": (1, 32)}[self.granularity]


def ways(case: Case) -> dict[str, Quantize]:
    """The implementations of this case without gradients of the range; all take (x, scale)."""
    spec = (case.block_size, *CODES)
    found: dict[str, Quantize] = {
        "qtk": lambda x, scale: fake_quantize(x, scale, None, *spec),
        "reference": lambda x, scale: affine.fake_quantize(x, scale, None, *spec),
        "compiled reference": torch.compile(lambda x, scale: FakeQuantize.apply(x, scale, None, *spec)),
    }
    if case.granularity == "tensor":
        zero = torch.zeros(1, dtype=torch.int32, device=case.device)
        found["torch builtin"] = lambda x, scale: torch.fake_quantize_per_tensor_affine(x, scale, zero, *CODES)
    elif case.granularity in ("channel", "channel_last"):
        axis = case.block_size.index(1)
        zeros = torch.zeros(1, dtype=torch.int32, device=case.device)
        found["torch builtin"] = lambda x, scale: torch.fake_quantize_per_channel_affine(
            x, scale, zeros.expand(scale.shape[0]).contiguous(), axis, *CODES
        )
    return found | aimet(case)


def aimet(case: Case) -> dict[str, Quantize]:
    """AIMET's quantize-dequantize, if it is installed."""
    try:
        from aimet_torch.v2.quantization.affine.backends import quantize_dequantize
    except ImportError:
        return {}
    shape = {"tensor": (), "channel": (-1, 1), "channel_last": (1, -1), "block": None}[case.granularity]
    block_size = (1, 32) if case.granularity == "block" else None

    def quantize(x: Tensor, scale: Tensor) -> Tensor:
        step = scale if shape is None else scale.reshape(shape)
        return quantize_dequantize(x, step, torch.zeros_like(step), *CODES, block_size=block_size)

    return {"AIMET": quantize}


def learned(case: Case) -> dict[str, Quantize]:
    """The implementations with gradients of the range."""
    found = ways(case)
    found.pop("reference")
    if "torch builtin" in found:
        zeros = torch.zeros(case.tensors()[1].shape, device=case.device)
        if case.granularity == "tensor":
            found["torch builtin"] = lambda x, scale: torch._fake_quantize_learnable_per_tensor_affine(
                x, scale, zeros, *CODES
            )
        else:
            axis = case.block_size.index(1)
            found["torch builtin"] = lambda x, scale: torch._fake_quantize_learnable_per_channel_affine(
                x, scale, zeros, axis, *CODES
            )
    return found


def prove(case: Case, way: str, quantize: Quantize) -> bool:
    """Whether this implementation matches the reference; prints a message if not."""
    x, scale = case.tensors()
    expected = affine.fake_quantize(x, scale, None, case.block_size, *CODES)
    if not able(case, way, lambda: quantize(x, scale)):
        return False
    off = (quantize(x, scale).float() - expected.float()).abs()
    # a tie may go another way at others, and half precision be computed in half precision
    bound = 0.0 if way == "qtk" else float(scale.max()) * (1.01 if case.kind == "float32" else 2)
    if float(off.max()) > bound:
        tqdm.write(f"{way} is off by {float(off.max()):g} on {case}; not timed")
        return False
    return True


def forward_actions(case: Case) -> dict[str, Callable[[], object]]:
    x, scale = case.tensors()
    with torch.no_grad():
        proved = {way: quantize for way, quantize in ways(case).items() if prove(case, way, quantize)}
    return {way: (lambda quantize=quantize: quantize(x, scale)) for way, quantize in proved.items()}


def training_actions(case: Case) -> dict[str, Callable[[], object]]:
    x, scale = case.tensors()
    x.requires_grad_()
    scale.requires_grad_()
    grad = torch.randn_like(x)

    def step(quantize: Quantize) -> Callable[[], object]:
        return lambda: torch.autograd.grad(quantize(x, scale), (x, scale), grad)

    steps = {way: step(quantize) for way, quantize in learned(case).items() if prove(case, way, quantize)}
    return {way: run for way, run in steps.items() if able(case, way, run)}


def able(case: Case, way: str, run: Callable[[], object]) -> bool:
    """Whether this implementation runs the case at all; prints a message if not."""
    try:
        run()
    except (RuntimeError, NotImplementedError, TypeError) as error:
        tqdm.write(f"{way} cannot compute {case}: {str(error).splitlines()[0]}")
        return False
    return True


def measure(case: Case, given: Given) -> list[Timed]:
    found = []
    for action, copies, actions in (("forward", 1.0, forward_actions), ("forward + backward", 2.5, training_actions)):
        torch.compiler.reset()
        x, _ = case.tensors()
        into = torch.empty_like(x)
        with torch.set_grad_enabled(action != "forward"):
            floors = {"copy_": lambda into=into, x=x: into.copy_(x), "clone": lambda x=x: x.clone()}
            setting = Setting(case.device, case.kind, case.granularity, case.elements, action, copies)
            found += multiples({**floors, **actions(case)}, setting, given)
    return found


def main() -> None:
    given = arguments(__doc__, sizes=SIZES)
    found: list[Timed] = []
    for elements in given.elements:
        for kind in given.kinds:
            for granularity in GRANULARITIES:
                found += measure(Case(given.device, kind, granularity, elements), given)
    finish(found, given)


if __name__ == "__main__":
    main()
