"""Batches of tokens for language models: from tensors, mappings or a text; which tokens are padding; the logits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeGuard

import torch
from torch import Tensor, nn

from qtk.data.forward_pass import Batch
from qtk.errors import CalibrationError
from qtk.torch_private import pytree

INPUT_IDS, ATTENTION_MASK = "input_ids", "attention_mask"
DECODER, LABELS = "decoder_", "labels"
HIDDEN = "last_hidden_state"
"""What models of transformers without a head return."""

WITH_HEAD = ("pass the model with its head, as transformers.AutoModelForCausalLM.from_pretrained(…), or "
             "forward=lambda model, batch: … that returns logits")
LENGTH = 512
"""Tokens of a sample of a text, if nothing else is said."""

Tokenizer: TypeAlias = Callable[[str], object]
"""From a text to its token ids: a list, a tensor, or a mapping with ``input_ids`` as the tokenizers of transformers."""

TokenData: TypeAlias = Iterable[Batch] | Tensor | Mapping[str, object] | str | os.PathLike[str]
"""Batches of tokens; one such batch; or the path of a text file, which needs a tokenizer."""

ValidTokensOf: TypeAlias = str | Callable[[Batch], Tensor]
"""The name of the mask in a mapping, or a function from a batch to the mask."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenBatch:
    """The tokens of a batch.

    Args:
        ids: the tokens.
        counted: which of them are no padding.
        labels: the token that each position is to predict; ``None``: the next of ``ids``.

    Shape: ``ids`` [samples, tokens], integer; ``counted`` bool, ``labels`` integer likewise.
    """

    ids: Tensor
    counted: Tensor
    labels: Tensor | None = None

    @classmethod
    def of(
        cls, batch: Batch, valid: ValidTokensOf | None = None, *, is_encoder_decoder: bool | None = None
    ) -> TokenBatch:
        """The tokens of what a model is called with, for which it returns logits.

        The ids are ``input_ids`` of a mapping, else the first integer tensor [samples, tokens]; the mask is
        ``attention_mask`` of a mapping, unless ``valid`` says another. A mask of other axes counts all tokens. Of an
        encoder-decoder they are ``decoder_input_ids`` with ``decoder_attention_mask``; or ``labels``, each the token
        that its own position is to predict, of which negative ones do not count.

        Args:
            batch: the batch.
            valid: the mask.
            is_encoder_decoder: whether the model is one; ``None``: it is if the batch has ``decoder_input_ids``, or
                labels other than its ``input_ids`` (in place, or moved by one as some decoders take them).

        Raises: CalibrationError if there are no such ids, or the mask is not one of theirs.
        """
        ids, labels, mask = _decoder_tokens(batch, is_encoder_decoder)
        if valid is not None:
            mask = valid(batch) if callable(valid) else batch.get(valid) if isinstance(batch, Mapping) else None
            if not isinstance(mask, Tensor) or mask.shape != ids.shape:
                got = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
                shown = getattr(valid, "__name__", valid)
                raise CalibrationError(f"valid={shown!r} must give a mask of the token ids, {tuple(ids.shape)}, got "
                                       f"{got}; name a key of the batches, a dict, or pass a "
                                       "function from a batch to the mask")
        counted = torch.ones_like(ids, dtype=torch.bool)
        if isinstance(mask, Tensor) and mask.shape == ids.shape:
            counted = mask.to(ids.device).bool()
        return cls(ids, counted if labels is None else counted & (labels >= 0), labels)

    @classmethod
    def all_of(cls, ids: Tensor) -> TokenBatch:
        """A batch of which all tokens count."""
        return cls(ids, torch.ones_like(ids, dtype=torch.bool))

    def targets(self) -> tuple[Tensor, Tensor]:
        """The token that each position is to predict, and for which positions that counts.

        Without labels a token counts if it and the token before it do. Shape: both [samples, tokens]; integer, bool.

        >>> TokenBatch.all_of(torch.tensor([[5, 6, 7]])).targets()
        (tensor([[6, 7, 5]]), tensor([[ True,  True, False]]))
        """
        if self.labels is not None:
            return self.labels, self.counted
        scored = torch.zeros_like(self.counted)
        scored[:, :-1] = self.counted[:, 1:] & self.counted[:, :-1]
        return self.ids.roll(-1, 1), scored

    def logits(self, output: object) -> Tensor:
        """Returns what a model returned for these tokens, as ``logits_of``."""
        return logits_of(output, self.ids.shape)


def is_encoder_decoder(model: nn.Module) -> bool | None:
    """Says whether a model of transformers is an encoder-decoder, as its config says; ``None`` of other models."""
    found = getattr(getattr(model, "config", None), "is_encoder_decoder", None)
    return found if isinstance(found, bool) else None


def logits_of(output: object, axes: Sequence[int] | None = None) -> Tensor:
    """The first tensor [samples, tokens, vocabulary] that a model returned; of ``axes`` samples and tokens, if given.

    Raises: CalibrationError if there is none, or the output says that it is hidden states.
    """
    if isinstance(output, Mapping) and HIDDEN in output and "logits" not in output:
        raise CalibrationError(f"the model returns {HIDDEN}, and no logits: it has no head; {WITH_HEAD}")
    if isinstance(output, Mapping) and isinstance(output.get("logits"), Tensor):
        output = output["logits"]
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    for leaf in leaves:
        if leaf.is_floating_point() and leaf.ndim == 3 and (axes is None or tuple(leaf.shape[:2]) == tuple(axes)):
            return leaf
    shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves) or "no tensor"
    wanted = "" if axes is None else f" for the token ids {tuple(axes)}"
    raise CalibrationError(f"the model must return logits [samples, tokens, vocabulary]{wanted}, it returns {shapes}; "
                           "pass forward=lambda model, batch: … that returns them")


def token_batches(data: TokenData, tokenizer: Tokenizer | None, length: int | None) -> Iterable[Batch]:
    """The batches of ``data``; of a text file samples of ``length`` tokens, one a batch, without what remains.

    Raises: CalibrationError for a text without a tokenizer, one that is shorter than a sample, or a tokenizer or a
        length without a text.
    """
    if isinstance(data, str | os.PathLike):
        return _text_batches(Path(data), tokenizer, LENGTH if length is None else length)
    for name, value in (("tokenizer", tokenizer), ("length", length)):
        if value is not None:
            raise CalibrationError(f"{name} is for the path of a text file, and the data are of type "
                                   f"{type(data).__name__}; leave {name} out")
    return [data] if isinstance(data, Tensor | Mapping) else data


def _text_batches(path: Path, tokenizer: Tokenizer | None, length: int) -> list[Batch]:
    if tokenizer is None:
        raise CalibrationError(f"the text {path} needs a tokenizer, a function from a text to its token ids: "
                               "tokenizer=transformers.AutoTokenizer.from_pretrained(…)")
    if length < 2:
        raise CalibrationError(f"length must be at least 2 tokens, got {length}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"cannot read the text {path}: {error}") from error
    found = tokenizer(text)
    if isinstance(found, Mapping):
        found = found.get(INPUT_IDS)
    try:
        ids = torch.as_tensor(found)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CalibrationError(f"the tokenizer must return token ids, got {type(found).__name__}: {error}") from error
    if ids.is_floating_point() or ids.numel() != max(ids.shape, default=0):
        raise CalibrationError(f"the tokenizer must return the token ids of one text, got {ids.dtype} of shape "
                               f"{tuple(ids.shape)}")
    if ids.numel() < length:
        raise CalibrationError(f"{path} has {ids.numel()} tokens, fewer than a sample of {length}; pass a longer text, "
                               "or a smaller length")
    return list(ids.flatten()[:ids.numel() // length * length].long().reshape(-1, 1, length))


def _are_ids(value: object) -> TypeGuard[Tensor]:
    """Says whether a value may be token ids, an integer tensor [samples, tokens]."""
    return isinstance(value, Tensor) and value.ndim == 2 and not (
        value.is_floating_point() or value.is_complex() or value.dtype is torch.bool)


def _ids(batch: Batch) -> Tensor:
    named = batch.get(INPUT_IDS) if isinstance(batch, Mapping) else None
    for leaf in [named] if isinstance(named, Tensor) else pytree.tree_leaves(batch):
        if _are_ids(leaf):
            return leaf
    raise CalibrationError("a batch must hold token ids, an integer tensor [samples, tokens], alone or as input_ids of "
                           f"a dict; got {type(batch).__name__}")


def _decoder_tokens(batch: Batch, is_encoder_decoder: bool | None) -> tuple[Tensor, Tensor | None, object]:
    """The ids for which a model returns logits, their labels, if it has any of its own, and the mask of both.

    Raises: CalibrationError if there are no such ids.
    """
    if not isinstance(batch, Mapping):
        return _ids(batch), None, None
    named, labels = batch.get(f"{DECODER}{INPUT_IDS}"), batch.get(LABELS)
    decoder_ids, own_labels = (each if _are_ids(each) else None for each in (named, labels))
    decodes = is_encoder_decoder if is_encoder_decoder is not None else (
        decoder_ids is not None or (own_labels is not None and not _repeats(own_labels, batch.get(INPUT_IDS))))
    if not decodes:
        return _ids(batch), None, batch.get(ATTENTION_MASK)
    mask = batch.get(f"{DECODER}{ATTENTION_MASK}")
    if own_labels is not None and (decoder_ids is None or decoder_ids.shape == own_labels.shape):
        return own_labels, own_labels, mask
    if decoder_ids is None:
        raise CalibrationError("an encoder-decoder returns logits for the tokens of its decoder; give the batches "
                               f"{DECODER}{INPUT_IDS} or {LABELS}, integer tensors [samples, tokens]; got "
                               f"{', '.join(map(str, batch))}")
    return decoder_ids, None, mask


def _repeats(labels: Tensor, ids: object) -> bool:
    """Says whether labels repeat the ids of a decoder alone, in place or moved by one, where they are not negative."""
    if not isinstance(ids, Tensor) or ids.shape != labels.shape:
        return False
    pairs = (labels, ids), (labels[:, :-1], ids[:, 1:])
    return any(bool(((own < 0) | (own == other.to(own.device))).all()) for own, other in pairs)
