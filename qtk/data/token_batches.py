"""Batches of tokens for language models: from tensors, mappings or a text; which tokens are padding; the logits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from qtk.data.forward_pass import Batch
from qtk.errors import CalibrationError
from qtk.torch_private import pytree

INPUT_IDS, ATTENTION_MASK = "input_ids", "attention_mask"
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

    Shape: ``ids`` [samples, tokens], integer; ``counted`` bool likewise.
    """

    ids: Tensor
    counted: Tensor

    @classmethod
    def of(cls, batch: Batch, valid: ValidTokensOf | None = None) -> TokenBatch:
        """The tokens of what a model is called with.

        The ids are ``input_ids`` of a mapping, else the first integer tensor [samples, tokens]; the mask is
        ``attention_mask`` of a mapping, unless ``valid`` says another. A mask of other axes counts all tokens.

        Raises: CalibrationError if there are no such ids, or the mask is not one of theirs.
        """
        ids = _ids(batch)
        if valid is None:
            mask = batch.get(ATTENTION_MASK) if isinstance(batch, Mapping) else None
            if not isinstance(mask, Tensor) or mask.shape != ids.shape:
                return cls.all_of(ids)
        else:
            mask = valid(batch) if callable(valid) else batch.get(valid) if isinstance(batch, Mapping) else None
            if not isinstance(mask, Tensor) or mask.shape != ids.shape:
                got = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
                shown = getattr(valid, "__name__", valid)
                raise CalibrationError(f"valid={shown!r} must give a mask of the token ids, {tuple(ids.shape)}, got "
                                       f"{got}; name a key of the batches, a dict, or pass a "
                                       "function from a batch to the mask")
        return cls(ids, mask.to(ids.device).bool())

    @classmethod
    def all_of(cls, ids: Tensor) -> TokenBatch:
        """A batch of which all tokens count."""
        return cls(ids, torch.ones_like(ids, dtype=torch.bool))

    def logits(self, output: object) -> Tensor:
        """What a model returned for these tokens, as ``logits_of``."""
        return logits_of(output, self.ids.shape)


def logits_of(output: object, axes: Sequence[int] | None = None) -> Tensor:
    """The first tensor [samples, tokens, vocabulary] that a model returned; of ``axes`` samples and tokens, if given.

    Raises: CalibrationError if there is none.
    """
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


def _ids(batch: Batch) -> Tensor:
    named = batch.get(INPUT_IDS) if isinstance(batch, Mapping) else None
    for leaf in [named] if isinstance(named, Tensor) else pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim == 2 and not (leaf.is_floating_point() or leaf.is_complex()
                                                                or leaf.dtype is torch.bool):
            return leaf
    raise CalibrationError("a batch must hold token ids, an integer tensor [samples, tokens], alone or as input_ids of "
                           f"a dict; got {type(batch).__name__}")
