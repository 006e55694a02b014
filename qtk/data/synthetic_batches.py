"""Makes batches where there are no data: images with the statistics that batch norms hold, or random tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from qtk.calls.calls import detached
from qtk.calls.inputs import ExampleInputs
from qtk.data.forward_pass import run_batch
from qtk.data.labels import without_labels
from qtk.errors import CalibrationError
from qtk.nn.eval_mode import evaluating
from qtk.public import public
from qtk.torch_private import pytree

STEPS, RATE = 200, 0.1
"""Steps of Adam, and its learning rate in standard deviations of the input."""

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class SyntheticBatches(list[object]):
    """A list of batches that were made, not measured.

    Args:
        batches: the batches.
        made_from: what they were made from, in words.
    """

    def __init__(self, batches: Iterable[object], made_from: str) -> None:
        super().__init__(batches)
        self.made_from = made_from

    def __repr__(self) -> str:
        return f"SyntheticBatches({len(self)} batches from {self.made_from})"


@public
def synthetic_batches(
    model: nn.Module, example_inputs: ExampleInputs, *, num_batches: int = 8, batch_size: int = 32, seed: int = 0,
    steps: int = STEPS,
) -> SyntheticBatches:
    """Makes batches for a model without data: worse than a hundred real samples, better than none.

    >>> import qtk
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    >>> batches = qtk.synthetic_batches(model, torch.zeros(1, 3, 8, 8), num_batches=2, batch_size=4, steps=5)
    >>> batches
    SyntheticBatches(2 batches from the statistics of 1 batch norm)
    >>> sim = qtk.QuantSim(model, batches[0])
    >>> sim.compute_encodings(batches, progress=False)

    Inputs of floats begin as normal noise, and Adam moves them until mean and standard deviation in front of each batch
    norm are its running ones (ZeroQ: Cai et al., arXiv:2001.00281, equation 3). Without batch norms they stay noise.
    Integer inputs that an embedding reads are random tokens of it; other inputs, as masks, are the example's.

    Args:
        model: a float model, or a prepared one.
        example_inputs: inputs it runs on, of whose shapes axis 0 is the batch.
        num_batches: how many batches.
        batch_size: samples of each.
        seed: of the noise and the tokens.
        steps: of Adam.

    Raises: CalibrationError if a number is below 1, or no input can be made.
    """
    for name, number in (("num_batches", num_batches), ("batch_size", batch_size), ("steps", steps)):
        if number < 1:
            raise CalibrationError(f"{name} must be at least 1; got {number}")
    example = without_labels(model, example_inputs)
    norms = [each for each in model.modules() if isinstance(each, BATCH_NORMS) and each.running_mean is not None]
    generator = torch.Generator().manual_seed(seed)
    vocabularies = _vocabularies(model, example)
    kinds: set[str] = set()

    def made(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            return leaf
        shape = (batch_size, *leaf.shape[1:])
        if leaf.is_floating_point():
            kinds.add("floats")
            return torch.randn(shape, generator=generator).to(leaf)
        size = min((size for tensor, size in vocabularies if tensor is leaf), default=None)
        if size is not None:
            kinds.add("tokens")
            return torch.randint(size, shape, generator=generator).to(leaf)
        return leaf[:1].expand(shape).clone()

    batches = [pytree.tree_map(made, example) for _ in range(num_batches)]
    if not kinds:
        raise CalibrationError("no input of the model is a tensor of floats, or read by an embedding: give data")
    reached = _reached(model, norms, batches[0]) if "floats" in kinds else 0
    if reached:
        batches = [_matched(model, norms, batch, steps) for batch in batches]
        made_from = f"the statistics of {reached} batch {'norm' if reached == 1 else 'norms'}"
    else:
        made_from = " and ".join({"floats": "normal noise", "tokens": "random tokens"}[kind] for kind in sorted(kinds))
    return SyntheticBatches(batches, made_from)


def _reached(model: nn.Module, norms: Sequence[nn.Module], batch: object) -> int:
    """Says how many batch norms run in eval mode; 0 if the inputs of floats reach none of them."""
    inputs = _floats(batch)
    with evaluating(model), torch.enable_grad(), _listening(norms) as seen:
        run_batch(model, batch)
        losses = [each for each in seen if each.requires_grad]
        gradients = torch.autograd.grad(torch.stack(losses).sum(), inputs, allow_unused=True) if losses else ()
    for each in inputs:
        each.requires_grad_(False)
    return min(len(seen), len(norms)) if any(each is not None for each in gradients) else 0


def _matched(model: nn.Module, norms: Sequence[nn.Module], batch: object, steps: int) -> object:
    """``batch`` with inputs of floats whose statistics in front of the batch norms equal the norms' running ones."""
    inputs = _floats(batch)
    optimizer = torch.optim.Adam(inputs, lr=RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    with evaluating(model), torch.enable_grad(), _listening(norms) as seen:
        for _ in range(steps):
            seen.clear()
            optimizer.zero_grad()
            run_batch(model, batch)
            gradients = torch.autograd.grad(torch.stack(seen).sum(), inputs, allow_unused=True)
            for each, gradient in zip(inputs, gradients, strict=True):
                each.grad = gradient
            optimizer.step()
            schedule.step()
    return detached(batch)


def _floats(batch: object) -> list[Tensor]:
    """The inputs of floats, which then require gradients."""
    return [leaf.requires_grad_() for leaf in pytree.tree_leaves(batch)
            if isinstance(leaf, Tensor) and leaf.is_floating_point()]


@contextmanager
def _listening(norms: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Collects how far the input of each batch norm is from what it holds, call by call."""
    seen: list[Tensor] = []

    def record(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(norm, BATCH_NORMS)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        x = inputs[0].movedim(1, 0).flatten(1)
        mean, deviation = norm.running_mean, norm.running_var.sqrt() + norm.eps
        loss = ((x.mean(1) - mean) / deviation).square()
        if x.shape[1] > 1:  # one value has no deviation
            loss = loss + (x.std(1) / deviation - 1).square()
        seen.append(loss.mean())

    handles = [norm.register_forward_pre_hook(record) for norm in norms]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _vocabularies(model: nn.Module, example: object) -> list[tuple[Tensor, int]]:
    """The integer inputs that are read by embeddings, each with the number of its tokens."""
    found: list[tuple[Tensor, int]] = []
    leaves = [leaf for leaf in pytree.tree_leaves(example) if isinstance(leaf, Tensor) and not leaf.is_floating_point()]

    def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(module, nn.Embedding)
        alias = [leaf for leaf in leaves if leaf.data_ptr() == inputs[0].data_ptr()]
        equal = [leaf for leaf in leaves if leaf.shape == inputs[0].shape and bool((leaf == inputs[0]).all())]
        found.extend((leaf, module.num_embeddings) for leaf in alias or equal)

    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    handles = [module.register_forward_pre_hook(record) for module in embeddings]
    try:
        with evaluating(model), torch.no_grad():
            run_batch(model, example)
    finally:
        for handle in handles:
            handle.remove()
    return found
