"""Measures how far a simulated language model's distributions are from the float model's distributions."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor, nn

from qtk.data.forward_pass import Batch, Forward, outputs, run_batch
from qtk.data.headless import embedding_shapes, refuse_hidden_states
from qtk.data.rolled_states import written_places
from qtk.data.token_batches import (
    TokenBatch,
    TokenData,
    Tokenizer,
    ValidTokensOf,
    is_encoder_decoder,
    token_batches,
)
from qtk.errors import CalibrationError
from qtk.graph.simulation import HasSimulation, Simulation
from qtk.layerwise.float_weights import FloatWeights
from qtk.nn.eval_mode import evaluating
from qtk.nn.kept_buffers import BufferValues, buffers_kept
from qtk.numerics.token_scores import divergences
from qtk.public import public
from qtk.quantizers.modes import in_mode
from qtk.quantizers.quantizer import Mode
from qtk.report.divergence import Divergence
from qtk.torch_private import pytree


@public
def divergence(
    sim: HasSimulation, data: TokenData, *, tokenizer: Tokenizer | None = None, length: int | None = None,
    forward: Forward | None = None, num_batches: int | None = None, valid: ValidTokensOf | None = None,
    reference: nn.Module | None = None, progress: bool = True,
) -> Divergence:
    """Measures the Kullback-Leibler divergence D(float ‖ simulated) of the next-token distributions.

    >>> import qtk, torch
    >>> _ = torch.manual_seed(0)
    >>> model = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50)).eval()
    >>> ids = torch.randint(0, 50, (4, 12))
    >>> sim = qtk.QuantSim(model, ids, config="default", activation_bits=None)
    >>> sim.compute_encodings(None)
    >>> found = qtk.divergence(sim, [ids], progress=False)
    >>> found.tokens, 0 < found.mean < found.worst < 1e-3
    (48, True)

    Perplexity sees the tokens of the data alone; this sees every probability, and tells settings apart that have the
    same perplexity. Where a layer-wise method has rewritten a weight, the float model has the weight that it had
    before.

    Args:
        sim: the simulation.
        data: as for ``qtk.perplexity``; likewise ``tokenizer``, ``length``, ``forward``, ``num_batches``, ``valid``.
        tokenizer: likewise.
        length: likewise.
        forward: likewise.
        num_batches: likewise.
        valid: likewise; every token that is no padding counts.
        reference: another model to compare with; ``None``: the simulation's own in float.
        progress: show a bar.

    Returns: the mean, and the worst token with its place.

    Raises: CalibrationError as ``qtk.perplexity``, or if both models' logits differ in shape.
    """
    simulation = sim.simulation
    run = forward or run_batch
    both = _in_turns(simulation, run) if reference is None else _beside(reference, run)
    pairs = outputs(simulation.model, token_batches(data, tokenizer, length), forward=both, num_batches=num_batches,
                    label="divergence", progress=progress)
    return _divergence(pairs, valid, simulation.model)


def divergence_of(
    model: nn.Module, reference: nn.Module, batches: Iterable[Batch], *, forward: Forward | None = None,
    valid: ValidTokensOf | None = None,
) -> Divergence:
    """The divergence D(reference ‖ model) of the next-token distributions, as ``divergence``."""
    return _divergence(outputs(model, batches, forward=_beside(reference, forward or run_batch)), valid, model)


def _divergence(
    pairs: Iterable[object], valid: ValidTokensOf | None, model: nn.Module | None = None
) -> Divergence:
    """The divergence over batches: output in float, output of the simulation, batch.

    Raises: CalibrationError if no token counts, or both outputs' logits differ in shape.
    """
    embeddings = frozenset[tuple[int, int]]() if model is None else embedding_shapes(model)
    decodes = None if model is None else is_encoder_decoder(model)
    total, count, worst, worst_at = 0.0, 0, -math.inf, (0, 0, 0)
    for index, made in enumerate(pairs):
        assert isinstance(made, tuple)
        expected, output, batch = made
        tokens = TokenBatch.of(batch, valid, is_encoder_decoder=decodes)
        in_float, simulated = tokens.logits(expected), tokens.logits(output)
        refuse_hidden_states(in_float, tokens.ids, embeddings)
        if in_float.shape != simulated.shape:
            raise CalibrationError(f"the simulation returns logits of shape {tuple(simulated.shape)}, the float model "
                                   f"of {tuple(in_float.shape)}; pass a reference with the same vocabulary")
        counted = tokens.counted.to(simulated.device)
        scores = divergences(in_float.to(simulated.device)[counted], simulated[counted]).cpu()
        if scores.numel():
            total, count = total + float(scores.double().sum()), count + scores.numel()
            largest = int(scores.argmax())  # NaN counts as the largest
            if not math.isnan(worst) and not float(scores[largest]) <= worst:
                sample, position = counted.nonzero()[largest].tolist()
                worst, worst_at = float(scores[largest]), (index, sample, position)
    if count == 0:
        raise CalibrationError("no token counts: every token of the data is padding")
    return Divergence(total / count, worst, worst_at, count)


def _in_turns(simulation: Simulation, run: Forward) -> Forward:
    """Runs a batch in float, then simulated; buffers that forward writes keep the float model's values."""
    float_weights = FloatWeights(simulation)

    def both(module: nn.Module, batch: Batch) -> object:
        places = written_places(module)
        before = BufferValues(places)
        with in_mode(simulation.quantizers.values(), Mode.BYPASS), float_weights.in_place():
            expected = pytree.tree_map_only(Tensor, Tensor.clone, run(module, batch))
        with buffers_kept(places):
            before.restore()
            return expected, run(module, batch), batch

    return both


def _beside(reference: nn.Module, run: Forward) -> Forward:
    """Runs a batch in another model, then simulated."""

    def both(module: nn.Module, batch: Batch) -> object:
        with evaluating(reference):
            expected = run(reference, batch)
        return expected, run(module, batch), batch

    return both
