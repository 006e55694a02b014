"""Models without a head: what they return are hidden states, which only look like logits."""

from __future__ import annotations

from collections.abc import Set

from torch import Tensor, nn

from qtk.data.token_batches import WITH_HEAD
from qtk.errors import CalibrationError
from qtk.graph.flow import Flow
from qtk.graph.graphs import graphs


def embedding_shapes(model: nn.Module) -> frozenset[tuple[int, int]]:
    """Words and widths of the embeddings of a model, as it was written or as it was prepared."""
    shapes = {tuple(module.weight.shape) for module in model.modules() if isinstance(module, nn.Embedding)}
    for graph in graphs(model).values():
        flow = Flow(graph.graph)
        for node in graph.graph.nodes:
            row = flow.row(node)
            for port in flow.weight_ports(node) if row is not None and row.kind == "embedding" else ():
                value = port.value.meta.get("val")
                shapes |= {tuple(value.shape)} if isinstance(value, Tensor) else set()
    return frozenset((int(shape[0]), int(shape[1])) for shape in shapes if len(shape) == 2)


def refuse_hidden_states(logits: Tensor, ids: Tensor, embeddings: Set[tuple[int, int]]) -> None:
    """Refuses an output that has the width of the embedding, and not one number for each of its words.

    That is so if the embedding has fewer words than it is wide, or a token is none of these numbers; a model may have
    another vocabulary behind than in front.

    Args:
        logits: what the model returned.
        ids: the tokens of the batch.
        embeddings: as ``embedding_shapes``.

    Shape: ``logits`` [samples, tokens, vocabulary]; ``ids`` any, integer.

    Raises: CalibrationError if it is such.
    """
    width = logits.shape[-1]
    words = max((words for words, wide in embeddings if wide == width), default=width)
    if width in {words for words, _ in embeddings} or words == width:
        return
    if words < width or (ids.numel() and int(ids.max()) >= width):
        raise CalibrationError(f"the model returns {width} numbers for each token, as many as its embedding of {words} "
                               f"words is wide: hidden states of a model without a head, and no logits; {WITH_HEAD}")


def refuse_other_words(logits: Tensor, targets: Tensor) -> None:
    """Refuses tokens that are not among the logits. Shape: as ``refuse_hidden_states``.

    Raises: CalibrationError if there is one.
    """
    width = logits.shape[-1]
    least, most = (int(each) for each in targets.aminmax()) if targets.numel() else (0, 0)
    if least < 0 or most >= width:
        raise CalibrationError(f"the token id {least if least < 0 else most} is none of the {width} numbers for each "
                               "token that the model returns: these are hidden states of a model without a head, or "
                               f"the ids are of another tokenizer, or padding that no mask says; {WITH_HEAD}")
