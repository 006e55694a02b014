"""Layer-wise methods, one by one, as functions on a ``QuantSim``; each calls ``qtk.workflow.layerwise``."""

from __future__ import annotations

import warnings  # noqa: F401  the examples use it
from collections.abc import Iterable

import torch  # noqa: F401  the examples use it
from torch import nn  # noqa: F401  the examples use it

from qtk.data.forward_pass import Data, Forward
from qtk.data.valid_tokens import Valid
from qtk.graph.simulation import HasSimulation
from qtk.layerwise.adaround import AdaRound
from qtk.layerwise.bias_correction import BiasCorrection
from qtk.layerwise.gptq import Gptq
from qtk.layerwise.options import DEFAULT, LayerwiseOptions
from qtk.layerwise.reconstruction import Reconstruction
from qtk.layerwise.report import LayerwiseReport
from qtk.layerwise.seq_mse import SeqMse
from qtk.public import public
from qtk.workflow.layerwise import apply_layerwise


@public
def apply_seq_mse(
    sim: HasSimulation, data: Data, *,
    num_candidates: int = 20, refine: bool = False, joint: bool = False, exact: bool = False, loss: str = "mse",
    sites: Iterable[str] | str | None = None, forward: Forward | None = None, num_batches: int | None = None,
    valid: Valid | None = None, progress: bool = True, options: LayerwiseOptions = DEFAULT,
) -> LayerwiseReport:
    """Sequential MSE: gives every weight the scales with which the output of its layer changes least.

    >>> import qtk
    >>> _ = torch.manual_seed(2)
    >>> model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> batches = torch.randn(4, 64, 16) @ torch.randn(16, 16)
    >>> sim = qtk.QuantSim(model, batches[0], weight_bits=4)
    >>> report = qtk.apply_seq_mse(sim, batches, progress=False)
    >>> [layer.after <= layer.before for layer in report.layers]
    [True, True]

    The encodings are frozen, so that ``compute_encodings`` keeps them:

    >>> sim.compute_encodings(batches, progress=False)
    >>> [name for name, quantizer in sim.quantizers.items() if quantizer.frozen]
    ['0.weight', '2.weight']

    A finer search of one layer; frozen encodings are searched again only after ``unfreeze``:

    >>> sim.unfreeze("0.weight")
    >>> report = qtk.apply_seq_mse(sim, batches, num_candidates=50, refine=True, sites="0.*", progress=False)
    >>> [layer.name for layer in report.layers]
    ['0.weight']

    Args:
        sim: a ``QuantSim``; its encodings of weights change.
        data: as for ``compute_encodings``; a few hundred samples.
        num_candidates: ranges tried for every scale: ``i / num_candidates`` times the present one.
        refine: try as many once more, around the best.
        joint: for weights quantized in blocks, then block-coordinate descent on the error of the whole output.
        exact: compute the error of every candidate; otherwise estimates pick candidates whose errors are computed.
        loss: ``mse``, ``sqnr`` or ``l1``, see ``qtk.layerwise.seq_mse.SeqMse``.
        sites: weights to improve, by name or glob; ``None``: all.
        forward: how to run the model on a batch, as for ``compute_encodings``.
        num_batches: batches to take of the data; ``None``: all.
        valid: which tokens count, as for ``compute_encodings``.
        progress: show a bar.
        options: how the run goes through the layers, and what its results are judged by.

    Returns: error and SQNR of every layer's output before and after; printable.

    Raises: as ``apply_layerwise``.
    """
    return apply_layerwise(
        sim, data, [SeqMse(num_candidates, refine, joint, exact, loss)], sites=sites, forward=forward,
        num_batches=num_batches, valid=valid, progress=progress, options=options)


@public
def apply_gptq(
    sim: HasSimulation, data: Data, *,
    damping: float = 0.01, act_order: bool = True,
    sites: Iterable[str] | str | None = None, forward: Forward | None = None, num_batches: int | None = None,
    valid: Valid | None = None, progress: bool = True, options: LayerwiseOptions = DEFAULT,
) -> LayerwiseReport:
    """GPTQ: rounds weights column by column, each error propagated to the remaining columns by the inverse Hessian.

    Frantar et al., arXiv 2210.17323, algorithm 1; the scales stay what they are.

    >>> import qtk
    >>> _ = torch.manual_seed(2)
    >>> model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> batches = torch.randn(4, 64, 16) @ torch.randn(16, 16)
    >>> sim = qtk.QuantSim(model, batches[0], weight_bits=4)
    >>> report = qtk.apply_gptq(sim, batches, progress=False)
    >>> [layer.after < layer.before for layer in report.layers]
    [True, True]

    The new weights lie on the quantization grid, whose encodings are frozen:

    >>> weight = sim.model.get_parameter("0.weight")
    >>> torch.equal(sim.quantizers["0.weight"](weight), weight), sim.quantizers["0.weight"].frozen
    (True, True)

    Data of too few samples makes it fit noise, which it warns of; a larger damping helps:

    >>> sim = qtk.QuantSim(model, batches[0], weight_bits=4)
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore")
    ...     report = qtk.apply_gptq(sim, batches[:1, :20], damping=0.1, progress=False)

    Args:
        sim: a ``QuantSim``; its weights change.
        data: as for ``compute_encodings``; a few hundred samples, at least twice as many rows as a layer has columns.
        damping: added to the diagonal of the Hessian, as a multiple of its mean.
        act_order: round the columns with the largest inputs first.
        sites: weights to improve, by name or glob; ``None``: all.
        forward: how to run the model on a batch, as for ``compute_encodings``.
        num_batches: batches to take of the data; ``None``: all.
        valid: which tokens count, as for ``compute_encodings``.
        progress: show a bar.
        options: how the run goes through the layers, and what its results are judged by.

    Returns: error and SQNR of every layer's output before and after; printable.

    Raises: as ``apply_layerwise``; CalibrationError if a damped Hessian has no inverse.
    """
    return apply_layerwise(
        sim, data, [Gptq(damping, act_order)], sites=sites, forward=forward, num_batches=num_batches, valid=valid,
        progress=progress, options=options)


@public
def apply_adaround(
    sim: HasSimulation, data: Data, *,
    iterations: int = 100, through_activation: bool = False,
    sites: Iterable[str] | str | None = None, forward: Forward | None = None, num_batches: int | None = None,
    valid: Valid | None = None, progress: bool = True, options: LayerwiseOptions = DEFAULT,
) -> LayerwiseReport:
    """AdaRound: learns for every weight whether it is rounded up or down, so that its layer's output changes least.

    Nagel et al., arXiv 2004.10568, equations 21 to 25; the scales stay what they are.

    >>> import qtk
    >>> _ = torch.manual_seed(2)
    >>> model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> batches = torch.randn(4, 64, 16) @ torch.randn(16, 16)
    >>> sim = qtk.QuantSim(model, batches[0], weight_bits=4)
    >>> report = qtk.apply_adaround(sim, batches, iterations=100, progress=False)
    >>> [layer.after < layer.before for layer in report.layers]
    [True, True]

    Minimizing the error after the ReLU that follows ``0``, so that errors of negative outputs do not count:

    >>> sim = qtk.QuantSim(model, batches[0], weight_bits=4)
    >>> report = qtk.apply_adaround(sim, batches, iterations=100, through_activation=True, progress=False)

    Float formats have no evenly spaced neighbours to choose from and are left:

    >>> fp8 = {"version": 1, "extends": "default", "rules": [{"match": {"path": "0"}, "weight": {"dtype": "fp8_e4m3"}}]}
    >>> sim = qtk.QuantSim(model, batches[0], config=fp8)
    >>> print(qtk.apply_adaround(sim, batches, iterations=10, progress=False).skipped["0.weight"])
    AdaRound needs codes that are integers, not fp8_e4m3

    Args:
        sim: a ``QuantSim``; its weights change.
        data: as for ``compute_encodings``; a few hundred samples.
        iterations: steps of its optimizer.
        through_activation: where a ReLU, GELU or the like alone reads the output of a layer, minimize the error after
            it (equation 25), on a sample of rows.
        sites: weights to improve, by name or glob; ``None``: all.
        forward: how to run the model on a batch, as for ``compute_encodings``.
        num_batches: batches to take of the data; ``None``: all.
        valid: which tokens count, as for ``compute_encodings``.
        progress: show a bar.
        options: how the run goes through the layers, and what its results are judged by.

    Returns: error and SQNR of every layer's output before and after; printable.

    Raises: as ``apply_layerwise``.
    """
    return apply_layerwise(
        sim, data, [AdaRound(iterations, through_activation=through_activation)], sites=sites, forward=forward,
        num_batches=num_batches, valid=valid, progress=progress, options=options)


@public
def apply_reconstruction(
    sim: HasSimulation, data: Data, *,
    iterations: int = 200, window: int = 16,
    sites: Iterable[str] | str | None = None, forward: Forward | None = None, num_batches: int | None = None,
    valid: Valid | None = None, progress: bool = True, options: LayerwiseOptions = DEFAULT,
) -> LayerwiseReport:
    """Block reconstruction: learns the rounding of a block's weights and the ranges of its activations together.

    BRECQ (Li et al., arXiv 2102.05426) with QDrop (Wei et al., arXiv 2203.05740). A block lies between residual joins
    of the graph; a recurrent op, with its loop over time, is one. The loss is the relative error of what leaves the
    blocks and the divergence of the model's output, in nats; values are quantized or not at random. A window changes
    only if over the samples that are held out its loss falls and the divergence does not rise; it then learns on from
    all samples, unjudged.

    >>> import qtk
    >>> _ = torch.manual_seed(2)
    >>> model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> batches = torch.randn(4, 64, 16) @ torch.randn(16, 16)
    >>> sim = qtk.QuantSim(model, batches[0], weight_bits=3, activation_bits=3)
    >>> sim.compute_encodings(batches, progress=False)

    It goes on from what an earlier call has left, best from the recommended chain, whose scales it keeps:

    >>> report = qtk.apply_layerwise(sim, batches, ["seq_mse", "coordinate_descent"], progress=False)
    >>> report = qtk.apply_reconstruction(sim, batches, iterations=20, progress=False)
    >>> print(report)  # doctest: +ELLIPSIS
    0.weight … 2.weight  ... → ... dB  held out ... → ... dB  ...

    In one call, which takes the options of both; one block after the other:

    >>> sim = qtk.QuantSim(model, batches[0], weight_bits=3, activation_bits=3)
    >>> sim.compute_encodings(batches, progress=False)
    >>> methods = ["seq_mse", "coordinate_descent", "reconstruction(iterations=20, window=1)"]
    >>> report = qtk.apply_layerwise(sim, batches, methods, progress=False)

    Args:
        sim: a calibrated ``QuantSim`` of one graph; weights and ranges of activations change, and the ranges that were
            learned are frozen. Frozen ranges, dynamic ranges and ranges with scales in few bits stay as is.
        data: as for ``compute_encodings``; a few hundred samples in several batches: a batch is a step.
        iterations: steps of Adam for each window, and as many with all samples if the result is kept.
        window: blocks that are learned together; of a small net all, of a large one as many as memory takes.
        sites: weights to improve, by name or glob; ``None``: all.
        forward: how to run the model on a batch, as for ``compute_encodings``.
        num_batches: batches to take of the data; ``None``: all.
        valid: which tokens count, as for ``compute_encodings``.
        progress: show a bar.
        options: how the run goes through the blocks, and what its results are judged by; ``inputs`` is ``asym`` or
            ``symfp``.

    Returns: error and SQNR of what leaves every window before and after; printable.

    Raises: as ``apply_layerwise``; CalibrationError if the model runs as Python around its graphs, under ``torchrun``,
        and for options that do not apply.
    """
    return apply_layerwise(
        sim, data, [Reconstruction(iterations, window)], sites=sites, forward=forward, num_batches=num_batches,
        valid=valid, progress=progress, options=options)


@public
def correct_bias(
    sim: HasSimulation, data: Data, *,
    sites: Iterable[str] | str | None = None, forward: Forward | None = None, num_batches: int | None = None,
    valid: Valid | None = None, progress: bool = True, options: LayerwiseOptions = DEFAULT,
) -> LayerwiseReport:
    """Bias correction: corrects biases so that every output of a layer has its mean in the float model.

    Nagel et al., arXiv 1906.04721, section 4.2, with measured means.

    >>> import qtk
    >>> _ = torch.manual_seed(2)
    >>> model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> batches = torch.randn(4, 64, 16) @ torch.randn(16, 16)
    >>> sim = qtk.QuantSim(model, batches[0], weight_bits=2, activation_bits=None)
    >>> report = qtk.correct_bias(sim, batches, progress=False)
    >>> x = batches.flatten(0, 1)
    >>> torch.allclose(sim.model(x).mean(0), model(x).mean(0), atol=1e-4)
    True

    A layer without a bias is left:

    >>> model[0].bias = None
    >>> sim = qtk.QuantSim(model, batches[0], weight_bits=2)
    >>> qtk.correct_bias(sim, batches, progress=False).skipped
    {'0.weight': 'it has no bias to correct'}

    After another method, in one call:

    >>> sim = qtk.QuantSim(model, batches[0], weight_bits=2)
    >>> report = qtk.apply_layerwise(sim, batches, ["seq_mse", "bias_correction"], progress=False)

    Args:
        sim: a ``QuantSim``; its biases change, and the encodings of their weights are frozen.
        data: as for ``compute_encodings``; a few hundred samples.
        sites: weights to improve, by name or glob; ``None``: all.
        forward: how to run the model on a batch, as for ``compute_encodings``.
        num_batches: batches to take of the data; ``None``: all.
        valid: which tokens count, as for ``compute_encodings``.
        progress: show a bar.
        options: how the run goes through the layers, and what its results are judged by.

    Returns: error and SQNR of every layer's output before and after; printable.

    Raises: as ``apply_layerwise``.
    """
    return apply_layerwise(
        sim, data, [BiasCorrection()], sites=sites, forward=forward, num_batches=num_batches, valid=valid,
        progress=progress, options=options)
