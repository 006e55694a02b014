"""The settings that all layer-wise methods share: how a run goes through the layers, and what it is judged by."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from qtk.errors import ArgumentError
from qtk.layerwise.live_values import Offload
from qtk.layerwise.originals import Start
from qtk.layerwise.sparsity import Sparsity
from qtk.layerwise.walk import Inputs
from qtk.public import public


@public
@dataclass(frozen=True, slots=True)
class LayerwiseOptions:
    """Says how a layer-wise run goes through the layers, and what judges its results; the same for all methods.

    >>> import qtk, torch
    >>> _ = torch.manual_seed(0)
    >>> model, batches = torch.nn.Sequential(torch.nn.Linear(16, 8)).eval(), torch.randn(4, 64, 16)
    >>> sim = qtk.QuantSim(model, batches[0], weight_bits=4)
    >>> options = qtk.LayerwiseOptions(inputs="symfp", holdout=0.5)
    >>> report = qtk.apply_gptq(sim, batches, options=options, progress=False)

    A run that survives being killed; the same call resumes it, here with nothing left to do:

    >>> import os, tempfile
    >>> options = qtk.LayerwiseOptions(checkpoint_dir=tempfile.mkdtemp())
    >>> for _ in range(2):
    ...     sim = qtk.QuantSim(model, batches[0], weight_bits=4)
    ...     report = qtk.apply_gptq(sim, batches, options=options, progress=False)
    >>> sorted(os.listdir(options.checkpoint_dir))
    ['0000.safetensors', 'run.json']

    Args:
        inputs: which inputs the output error of a layer is measured on. ``asym``: the float model's for the float
            weight, the quantized model's for the quantized weight; ``symqt`` and ``symfp``: for both weights the
            quantized or the float model's. Inside loops over time, and in models that stay Python, ``asym`` is
            ``symfp``.
        offload: where values are kept between layers: ``none``, on the device; ``cpu``; ``disk``, a temporary
            directory.
        checkpoint_dir: where every finished layer is saved; a killed run resumes from there, with the same result bit
            for bit.
        holdout: fraction of the samples that methods do not see and their results are judged by: a layer changes only
            if its error over them falls; also sets the strength of the prior (``qtk.layerwise.candidates``). 0: all
            data are seen, and results always taken.
        groups: a label for each batch; whole groups are held out then, to judge by another kind of data. Bias
            correction alone, and losses other than the squared error, are not judged: they see all data.
        start: what a layer starts from that an earlier call has changed: ``float``, its float weight, bias and the
            encoding it had then; ``present``, the result of that call. ``None``: ``present`` for bias correction alone,
            else ``float``, with a warning. The float model has the original weights in either case.
        keep_originals: keep the float weights and biases of changed layers for later calls, in host memory, with
            ``offload="disk"`` in temporary files: as many bytes as the parameters that change, as long as the
            simulation lives. A copy of the simulation and its pickle have them, ``state_dict`` and ``save`` do not.
        calibrate_all_experts: take the statistics of mixtures of experts with every token sent to every expert, not
            to experts that the router chooses; costs as many runs of the experts as there are experts for one chosen.
            From the outputs of experts on, the model follows the router's choice.
        sparsity: ``2:4`` prunes two of four weights along the input axis of every layer first, the two with which its
            output changes least; methods see the mask, as they see the zeros of a weight that is pruned already, which
            none of them moves (of weights with at least 30 % exact zeros). Layers that it does not fit stay dense, and
            are listed in the report. ``None``: nothing is pruned.
        judge_parts: of a call with several methods, apply each method alone too, and keep the result with which the
            model's outputs are closest to float over the samples that are held out: the chain of all, or a part of it.
            Costs a run for each method, and twice the weights in host memory, with ``offload="disk"`` in files.
            Reconstruction is no part; it goes on from what is kept.

    Raises: ArgumentError if a value is not of its type, ``holdout`` not in [0, 1), or 0 with ``judge_parts``.
    """

    inputs: Inputs = "asym"
    offload: Offload = "none"
    checkpoint_dir: str | os.PathLike[str] | None = None
    holdout: float = 0.2
    groups: Sequence[Hashable] | None = None
    start: Start | None = None
    keep_originals: bool = True
    calibrate_all_experts: bool = False
    sparsity: Sparsity | None = None
    judge_parts: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.holdout < 1:
            raise ArgumentError(f"LayerwiseOptions: holdout is a fraction, at least 0 and below 1, got {self.holdout}")
        if self.judge_parts and not self.holdout:
            raise ArgumentError("LayerwiseOptions: judge_parts compares results over samples that are held out, and "
                                "holdout=0 holds out none; leave out one of them")


DEFAULT = LayerwiseOptions()
