"""Runs a model in train mode with dropout off, so that it can be compared with another, and notes what would drop."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from qtk.nn.attention import Attention
from qtk.nn.recurrent import Recurrent


class WithoutDropout(TorchFunctionMode):
    """A mode in which dropout functions return their input, attention drops no weights, train-only modules do nothing.

    ``drops``: path of a module → the probabilities with which the dropout functions and attentions that its own code
    called would have dropped, in order; 0 where they would not.

    Args:
        model: the model to run, in train mode. Changes it: probabilities become 0, some ``forward``s are replaced.
        train_only: its modules that act in train mode only.
    """

    def __init__(self, model: nn.Module, train_only: Collection[nn.Module] = ()) -> None:
        super().__init__()
        self.drops: dict[str, list[float]] = defaultdict(list)
        self._running = [""]
        self._paths = {module: path for path, module in model.named_modules()}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        for module, attribute in list(_probabilities(model)):
            setattr(module, attribute, 0.0)
        for module in train_only:
            vars(module)["forward"] = lambda x: x

    def __enter__(self) -> WithoutDropout:
        for module in self._paths:
            if not isinstance(module, torch.jit.ScriptModule):
                # a holder, which runs nothing, would warn
                self._handles.append(nn.Module.register_forward_pre_hook(module, self._enter, prepend=True))
                self._handles.append(nn.Module.register_forward_hook(module, self._leave, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            bound = {**dict(zip(names, args, strict=False)), **kwargs}
            self.drops[self._running[-1]].append(bound.get("dropout_p", 0.0))
            return func(**{**bound, "dropout_p": 0.0})
        if "dropout" in name:
            probability, training = (*args, *(None, None))[1:3]
            probability = kwargs.get("p", 0.5 if probability is None else probability)
            training = kwargs.get("training", kwargs.get("train", True if training is None else training))
            self.drops[self._running[-1]].append(probability if training else 0.0)
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._running.append(self._paths[module])

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        self._running.pop()


def _probabilities(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The modules that drop inside one op with a probability above 0, each with the name of that attribute."""
    for module in model.modules():
        match module:
            case nn.MultiheadAttention() | nn.RNNBase() | Recurrent():
                attribute = "dropout"
            case Attention():
                attribute = "p"
            case _:
                continue
        if getattr(module, attribute) > 0:
            yield module, attribute
