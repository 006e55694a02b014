"""What the output loses by each site: estimated by gradients, then measured for the worst."""

from __future__ import annotations

import fnmatch
import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor, nn

from qtk.analysis.error_gradients import ErrorGradients
from qtk.core.plan import leaders
from qtk.core.site import Site
from qtk.data.forward_pass import Batch, Forward, outputs, run_batch
from qtk.data.rolled_states import written_places
from qtk.data.valid_tokens import Valid, ValidTokens
from qtk.errors import CalibrationError
from qtk.graph.simulation import Simulation
from qtk.layerwise.float_weights import FloatWeights
from qtk.nn.kept_buffers import BufferValues, buffers_kept
from qtk.numerics.random_signs import random_signs
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode, Quantizer
from qtk.registry import nearest
from qtk.report.sensitivities import Sensitivities, Sensitivity
from qtk.torch_private import pytree

Loss: TypeAlias = Callable[[object, Batch], Tensor | float]
"""A function of what the model returns and the batch, the lower the better."""

PROBE_SEED = 0


def sensitivity(
    simulation: Simulation,
    data: Iterable[Batch],
    *,
    loss: Loss | None = None,
    top: int = 10,
    groups: Iterable[str] | str | None = None,
    forward: Forward | None = None,
    num_batches: int | None = None,
    progress: bool = True,
    valid: Valid | None = None,
) -> Sensitivities:
    """Measures how much the loss rises when a site alone is quantized, and falls when it alone is not.

    >>> import qtk
    >>> model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    >>> sim, batches = qtk.QuantSim(model, torch.randn(8, 8)), [torch.randn(64, 8)]
    >>> sim.compute_encodings(batches, progress=False)
    >>> sim.set_range("1:out", low=0.0, high=0.01)
    >>> sim.sensitivity(batches, progress=False)[0].name
    '1:out'

    Modules as groups, and a loss of one's own:

    >>> loss = lambda output, batch: output.square().mean()
    >>> sorted(row.name for row in sim.sensitivity(batches, loss=loss, groups="?", top=0, progress=False))
    ['0', '1', '2', 'input:input']

    By default the loss is the power of the outputs' error over the power of the float outputs, ``10^(-SQNR/10)``, of
    the ``valid`` tokens alone where there are others; a loss of one's own decides itself what counts.

    Let ``e`` be the error that a site's quantizer makes of the float value, ``J`` the Jacobian of the outputs with
    respect to the value, ``g`` and ``H`` gradient and Hessian of the loss at the float outputs. To second order, with
    the Gauss-Newton matrix ``JᵀHJ`` in place of the Hessian of the model (arXiv 1412.1193, section 8),

        increase ≈ g·Je + ½ (Je)ᵀH(Je)

    For the squared error ``g = 0`` and ``H = 2``: first-order terms vanish at the float model. A backward pass from the
    outputs gives the products with ``Je`` of all sites. The second-order term comes from random signs ``r`` at the
    outputs: ``(Je)ᵀH(Je) = E[(r·Je)(Hr·Je)]`` (Hutchinson 1990), with signs of their own for each sample. So the
    squared error needs one backward pass, any other loss three: ``g``, ``r`` and ``Hr``.

    A recovery is measured or not known: rounding errors of simulated and float values differ, and
    switching one site rounds all values behind it anew, by chance to the better or the worse.

    The ``top`` rows with the largest estimated increase are then measured, by two runs over the data each.

    Where a layer-wise method has rewritten a weight, the float model has the weight that it had before, and so has the
    simulation in which this site alone is not quantized.

    Args:
        simulation: calibrated.
        data: batches; a source that can be read once is kept in memory.
        loss: ``loss(outputs, batch)``; ``None``: error of the outputs relative to their power, ``10^(-SQNR/10)``.
        top: how many rows are measured, which costs two runs over the data each.
        groups: paths of modules, or globs over them, whose sites are switched together.
        forward: as for ``compute_encodings``.
        num_batches: as for ``compute_encodings``.
        progress: show bars.
        valid: as for ``compute_encodings``; not beside a loss, which says itself what counts.

    Raises: CalibrationError without data, for a loss that is not finite or no scalar, an output without a gradient,
        groups that match no module, or ``valid`` beside a loss.
    """
    if loss is not None and valid is not None:
        raise CalibrationError("loss and valid exclude each other: a loss of one's own says which tokens count; leave "
                               "valid out, or compute the loss of the valid tokens")
    if top < 0:
        raise CalibrationError(f"top must be at least 0, the number of rows to measure; got {top}")
    grouped = _groups(simulation, groups)
    batches = data
    if isinstance(data, Iterator) and top and (num_batches is None or num_batches > 0):  # read twice
        batches = list(itertools.islice(data, None if num_batches is None else min(num_batches, sys.maxsize)))
    tokens, float_weights = ValidTokens(simulation.model, valid), FloatWeights(simulation)
    run = tokens.forward(forward) or run_batch
    estimates = _Estimates(simulation, loss, run, float_weights, tokens)
    with tokens.listening():
        _run(simulation.model, batches, estimates.observe, num_batches, "estimating", progress)
    rows, totals = {name: estimates.row(name, members) for name, members in grouped.items()}, estimates.totals
    worst = sorted(rows, key=lambda name: -_unknown_first(rows[name].increase))[:top]
    if worst:
        measured = _Measured(simulation, loss, run, tokens, {name: grouped[name] for name in worst}, float_weights)
        with tokens.listening():
            _run(simulation.model, batches, measured.observe, num_batches, "measuring", progress)
        rows |= {name: measured.row(rows[name]) for name in worst}
        totals = measured.totals
    tokens.warn_of_unfollowed({})
    return Sensitivities(rows.values(), float_loss=_divided(totals.in_float, totals.unit),
                         loss=_divided(totals.simulated, totals.unit) if worst else math.nan)


def _unknown_first(increase: float) -> float:
    return math.inf if math.isnan(increase) else increase


def _run(
    model: nn.Module, data: Iterable[Batch], forward: Forward, num_batches: int | None, label: str, progress: bool
) -> None:
    for _ in outputs(model, data, forward=forward, num_batches=num_batches, label=label, progress=progress):
        pass


def _groups(simulation: Simulation, groups: Iterable[str] | str | None) -> dict[str, dict[Site, Quantizer]]:
    """The quantizers of each row: of all sites in a module that a glob matches, or of one other site."""
    globs = [] if groups is None else [groups] if isinstance(groups, str) else list(groups)
    for glob in globs:
        if not isinstance(glob, str):
            raise CalibrationError(f"groups: a module is given by its path or a glob over paths, got {glob!r}")
    found: dict[str, dict[Site, Quantizer]] = {}
    unused = set(globs)
    for site in leaders(simulation.plan):
        path = site.owner.partition("@")[0].split(".")
        name = site.name
        for glob in globs:
            module = ".".join(path[:glob.count(".") + 1])
            if module and fnmatch.fnmatchcase(module, glob.replace("[", "[[]")):
                name = module
                unused.discard(glob)
                break
        found.setdefault(name, {})[site] = simulation.quantizers[site]
    if unused:
        glob = sorted(unused)[0]
        modules = sorted({site.owner for site in simulation.plan if site.owner})
        raise CalibrationError(f"groups: {glob!r} matches no module with a quantized value; {nearest(glob, modules)}; "
                               "print(sim.plan) shows all")
    return found


@dataclass(slots=True)
class _Totals:
    """Sums over batches of the loss, or of the squared error and its reference."""

    user_loss: Loss | None
    signal: float = 0.0
    in_float: float = 0.0
    simulated: float = 0.0
    batches: int = 0

    @property
    def unit(self) -> float:
        """Returns what a sum over batches is divided by."""
        return float(self.batches) if self.user_loss is not None else self.signal

    def loss(self, output: object, batch: Batch, reference: Sequence[_Output]) -> Tensor:
        """The loss of one batch; by default the squared distance to the float outputs."""
        if self.user_loss is None:
            leaves = _values(output)
            if [leaf.shape for leaf in leaves] != [each.value.shape for each in reference]:
                raise CalibrationError("the simulation returns values of other shapes than the float model, which the "
                                       "default loss cannot compare; pass loss=")
            pairs = zip(leaves, reference, strict=True)
            value: object = sum(((a - b.value)[b.counted].double().square().sum() for a, b in pairs),
                                torch.zeros((), dtype=torch.float64))
        else:
            value = self.user_loss(output, batch)
        value = torch.as_tensor(value) if isinstance(value, int | float) else value
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise CalibrationError(f"loss(outputs, batch) must return one number, got {got}; take its mean")
        if not math.isfinite(float(value.detach())):
            raise CalibrationError(f"the loss is {float(value.detach())}; loss(outputs, batch) and the outputs must be "
                                   "finite in float and simulated")
        return value.reshape(())


@dataclass(slots=True)
class _Estimates:
    """Estimates by gradients, summed over batches."""

    simulation: Simulation
    user_loss: Loss | None
    run: Forward
    float_weights: FloatWeights
    tokens: ValidTokens
    totals: _Totals = field(init=False)
    gradients: ErrorGradients = field(init=False)
    probes: torch.Generator = field(init=False)
    first: dict[Quantizer, float] = field(default_factory=lambda: defaultdict(float))
    pairs: list[tuple[dict[Quantizer, _Products], dict[Quantizer, _Products]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        acting = [self.simulation.quantizers[site] for site in leaders(self.simulation.plan)]
        self.totals = _Totals(self.user_loss)
        simulating = [each for each in acting if each.mode is Mode.SIMULATE]
        self.gradients = ErrorGradients(simulating, self.float_weights.rounded)
        self.probes = torch.Generator().manual_seed(PROBE_SEED)

    def observe(self, model: nn.Module, batch: Batch) -> object:
        with self.float_weights.in_place():  # backward too reads the weights
            return self._observe(model, batch)

    def _observe(self, model: nn.Module, batch: Batch) -> object:
        with in_mode(self.simulation.quantizers.values(), Mode.BYPASS), self.gradients.listening(model):
            output = self.run(model, batch)
        reference = _counted(output, self.tokens)
        leaves = [leaf for leaf in _values(output) if leaf.requires_grad]
        if not leaves:
            raise CalibrationError("no output of the model has a gradient: none is a tensor of floats, with an axis, "
                                   "that depends on a quantized value")
        self.totals.batches += 1
        self.totals.signal += sum(each.power for each in reference)
        self.gradients.count_samples(leaves)
        counted = [each.counted for leaf, each in zip(_values(output), reference, strict=True) if leaf.requires_grad]
        signs = [random_signs(leaf, self.probes) * which for leaf, which in zip(leaves, counted, strict=True)]
        if self.user_loss is None:
            errors = self.gradients.products(leaves, signs)
            self.pairs.append((errors, {each: (2 * samples, 2 * rest) for each, (samples, rest) in errors.items()}))
            return None
        loss, curved = self._derivatives(output, batch, reference, leaves, signs)
        for quantizer, (samples, rest) in self.gradients.products([loss], None, keep=True).items():
            self.first[quantizer] += float(torch.as_tensor(samples).double().sum()) + float(rest)
        errors = self.gradients.products(leaves, signs, keep=True)
        self.pairs.append((errors, self.gradients.products(leaves, curved)))
        return None

    def _derivatives(
        self, output: object, batch: Batch, reference: Sequence[_Output], leaves: list[Tensor],
        signs: list[Tensor],
    ) -> tuple[Tensor, list[Tensor]]:
        """The loss, and the product of its Hessian at the outputs with the signs."""
        with torch.enable_grad():
            loss = self.totals.loss(output, batch, reference)
            if not loss.requires_grad:
                raise CalibrationError("loss(outputs, batch) has no gradient; compute it of the outputs by operations "
                                       "of torch, without detach, item or argmax, or leave loss out")
            self.totals.in_float += float(loss.detach())
            gradient = _filled(torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True), leaves)
            along = torch.stack([(a * b).sum() for a, b in zip(gradient, signs, strict=True)]).sum()
            curved: Sequence[Tensor | None] = [None] * len(leaves)
            if along.requires_grad:  # of a loss that is not linear
                curved = torch.autograd.grad(along, leaves, retain_graph=True, allow_unused=True)
        return loss, _filled(curved, leaves)

    def row(self, name: str, members: dict[Site, Quantizer]) -> Sensitivity:
        quantizers = list(members.values())
        second = sum(_inner(left, right, quantizers) for left, right in self.pairs) / 2
        increase = _divided(sum(self.first[each] for each in quantizers) + second, self.totals.unit)
        sites = tuple(site.name for site in members)
        known = {quantizer for pair in self.pairs for quantizer in pair[0]} - self.gradients.lost
        if any(quantizer in self.gradients.seen and quantizer not in known for quantizer in quantizers):
            increase = math.nan  # no gradient reaches it: a detached value, one that is overwritten
        return Sensitivity(name, sites, increase, math.nan, False, increase)


_Products: TypeAlias = tuple[Tensor | float, Tensor | float]


def _inner(
    left: dict[Quantizer, _Products], right: dict[Quantizer, _Products], quantizers: Sequence[Quantizer]
) -> float:
    """``Σ (r·Je)(Hr·Je)`` over samples, of the errors of all ``quantizers`` together."""
    (a, rest_a), (b, rest_b) = (
        [torch.as_tensor(sum(products.get(each, (0.0, 0.0))[i] for each in quantizers)).double() for i in (0, 1)]
        for products in (left, right)
    )
    if float(rest_a) or float(rest_b):  # samples that are not told apart
        a, b = a.sum() + rest_a, b.sum() + rest_b
    return float((a * b).sum())


@dataclass(slots=True)
class _Measured:
    """The loss with single rows switched, summed over batches."""

    simulation: Simulation
    user_loss: Loss | None
    run: Forward
    tokens: ValidTokens
    groups: dict[str, dict[Site, Quantizer]]
    float_weights: FloatWeights
    totals: _Totals = field(init=False)
    alone: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    without: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def __post_init__(self) -> None:
        self.totals = _Totals(self.user_loss)

    def observe(self, model: nn.Module, batch: Batch) -> object:
        quantizers = list(self.simulation.quantizers.values())
        modes = {quantizer: quantizer.mode for quantizer in quantizers}
        places = written_places(model)
        before = BufferValues(places)
        with in_mode(quantizers, Mode.BYPASS), self.float_weights.in_place():
            output = self.run(model, batch)
        reference = _counted(output, self.tokens)

        def loss(output: object) -> float:
            return float(self.totals.loss(output, batch, reference))

        def loss_again() -> float:
            before.restore()
            return loss(self.run(model, batch))

        self.totals.batches += 1
        self.totals.signal += sum(each.power for each in reference)
        self.totals.in_float += loss(output)
        with buffers_kept(places):  # the next batch finds what the float model leaves
            self.totals.simulated += loss_again()
            for name, members in self.groups.items():
                own = set(members.values())
                with in_mode(quantizers, Mode.BYPASS), self.float_weights.in_place(but=own):
                    for quantizer in members.values():
                        quantizer.mode = modes[quantizer]
                    self.alone[name] += loss_again()
                with in_mode(own, Mode.BYPASS), self.float_weights.in_place(of=own):
                    self.without[name] += loss_again()
        return None

    def row(self, estimate: Sensitivity) -> Sensitivity:
        unit, totals = self.totals.unit, self.totals
        return Sensitivity(
            estimate.name, estimate.sites, _divided(self.alone[estimate.name] - totals.in_float, unit),
            _divided(totals.simulated - self.without[estimate.name], unit), True, estimate.increase,
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Output:
    """A float output, and which of its elements count: the finite ones (masked scores are -inf) of valid tokens."""

    value: Tensor
    counted: Tensor

    @property
    def power(self) -> float:
        return float(self.value[self.counted].double().square().sum())


def _counted(output: object, tokens: ValidTokens) -> list[_Output]:
    found = []
    for leaf in _values(output):
        valid, finite = tokens.counted_of_output(leaf), leaf.detach().isfinite()
        found.append(_Output(leaf.detach(), finite if valid is None else finite & valid))
    return found


def _values(output: object) -> list[Tensor]:
    """The tensors of floats in what a model returns, without scalars: losses that it computes itself."""
    return [leaf for leaf in pytree.tree_leaves(output)
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim]


def _filled(gradients: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    """Zeros in place of ``None``, as of outputs that the loss does not read."""
    return [torch.zeros_like(each) if gradient is None else gradient
            for gradient, each in zip(gradients, like, strict=True)]


def _divided(value: float, unit: float) -> float:
    return value / unit if unit else (math.nan if value else 0.0)
