"""One call of a module: its arguments and its output, and copies of them."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from qtk.calls.token_masks import TokenMasks
from qtk.errors import OUT_OF_MEMORY
from qtk.torch_private import pytree

Tree = TypeVar("Tree")


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call of a module and its output.

    Args:
        args: positional arguments.
        kwargs: keyword arguments.
        output: the value returned; ``None`` where it is not known.
        valid: which tokens of its inputs count; ``None``: all.
        buffers: name → value before the call of the buffers that it writes; buffers left out have their present values.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: object
    valid: TokenMasks | None = None
    buffers: Mapping[str, Tensor] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, object]) -> Call:
        """Clones the tensors: torch has deep copies of dense ones only."""
        return replace(self, args=detached(self.args), kwargs=detached(self.kwargs))

    @property
    def numel(self) -> int:
        """Number of elements of all tensor arguments."""
        leaves = pytree.tree_leaves((self.args, self.kwargs))
        return sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))


def leaves_text(tree: object) -> str:
    """Dtype and shape of every tensor in a pytree, the type of everything else, for messages.

    >>> leaves_text((torch.ones(2, 3), [7]))
    'float32 [2, 3], int'
    """
    return ", ".join(
        f"{leaf.dtype} {list(leaf.shape)}".removeprefix("torch.") if isinstance(leaf, Tensor) else type(leaf).__name__
        for leaf in pytree.tree_leaves(tree)
    )


def detached(tree: Tree) -> Tree:
    """A copy of ``tree`` whose tensors are detached clones, and whose other objects a call cannot change for the next.

    >>> class Cache:
    ...     keys = None
    >>> cache = Cache()
    >>> detached((cache, 1))[0].keys = "filled"
    >>> cache.keys
    """
    memo: dict[int, object] = {}
    copies: Tree = pytree.tree_map(lambda leaf: _copied(leaf, memo), tree)
    return copies


def _copied(leaf: object, memo: dict[int, object]) -> object:
    """A copy of a leaf; objects in it that ``memo`` has are copied once, and tensors of one storage stay so."""
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    if leaf is None or isinstance(leaf, (bool, int, float, complex, str, bytes, type, nn.Module)) or callable(leaf):
        return leaf
    try:
        for tensor in _tensors_in(leaf):
            if id(tensor) in memo:
                continue
            if tensor.layout is not torch.strided:
                memo[id(tensor)] = tensor.detach().clone()
            elif not tensor.is_leaf:
                memo[id(tensor)] = copy.deepcopy(tensor.detach(), memo)
        return copy.deepcopy(leaf, memo)
    except Exception:  # whatever a user's object raises, a lock or a generator in it
        return leaf


def _tensors_in(value: object, depth: int = 4) -> Iterator[Tensor]:
    """The tensors in the attributes of an object: torch has no deep copies of some."""
    for leaf in pytree.tree_leaves(getattr(value, "__dict__", None)):
        if isinstance(leaf, Tensor):
            yield leaf
        elif depth and not isinstance(leaf, (nn.Module, type)):
            yield from _tensors_in(leaf, depth - 1)


def cloned(tree: Tree) -> Tree:
    """A copy of ``tree`` whose tensors are clones, which gradients pass."""
    copies: Tree = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)
    return copies


def distinct(tree: Tree) -> Tree:
    """``tree`` with a copy of each tensor that occurs in it a second time.

    ``torch.export`` takes one tensor passed twice for one input, and would compute with the second of two others.
    """
    seen: set[int] = set()

    def copied(leaf: object) -> object:
        if not isinstance(leaf, Tensor) or id(leaf) not in seen:
            seen.add(id(leaf))
            return leaf
        return leaf.clone()

    copies: Tree = pytree.tree_map(copied, tree)
    return copies


def with_rows(model: nn.Module, call: Call) -> Call:
    """``call`` with two rows of zeros for each tensor whose axis 0 is empty; unchanged if ``model`` fails on them.

    ``torch.export`` takes an axis of length 0 for a constant; an expert that receives no tokens is called with one.
    """

    def filled(leaf: object) -> object:
        return leaf.new_zeros(2, *leaf.shape[1:]) if isinstance(leaf, Tensor) and leaf.shape[:1] == (0,) else leaf

    args, kwargs = pytree.tree_map(filled, (call.args, call.kwargs))
    try:
        with torch.no_grad():
            model(*detached(args), **detached(kwargs))
    except OUT_OF_MEMORY:
        raise
    except Exception:
        return call
    return replace(call, args=args, kwargs=kwargs)


def raised_in(model: nn.Module, error: BaseException) -> str | None:
    """The path of the innermost submodule whose code raised ``error``; ``None`` if the model itself did, or unknown."""
    paths = {module: path for path, module in model.named_modules()}
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    owners = (frame.f_locals.get("self") for frame in frames)
    innermost = (paths[owner] for owner in reversed([*owners]) if isinstance(owner, nn.Module) and owner in paths)
    return next(innermost, None) or None
