"""Runs a model in train mode with dropout off, so that it can be compared with another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qtk.capture.calls import detached
from qtk.graph.captured_graph import CapturedGraph
from qtk.nn.attention import Attention
from qtk.nn.dropout import Dropout
from qtk.nn.recurrent import Recurrent
from qtk.torch_private import version_of


class WithoutDropout(TorchFunctionMode):
    """A mode in which dropout functions return their input and attention drops no weights.

    Modules that return their input in eval mode and something else in train mode (stochastic depth, DropBlock) return
    it too. ``calls`` counts the function calls that would have dropped, by name; ``modules`` holds such modules.

    Args:
        model: the model to run, in train mode. Changes it: probabilities become 0, some ``forward``s are replaced.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.calls = Counter[str]()
        self.modules: set[nn.Module] = set()
        for module, attribute in list(_probabilities(model)):
            setattr(module, attribute, 0.0)
        captured = {inner for graph in model.modules() if isinstance(graph, CapturedGraph) for inner in graph.modules()}
        for module in model.modules():
            if module not in captured and _may_drop(module):
                module.forward = self._without_drop(module)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            bound = {**dict(zip(names, args, strict=False)), **kwargs}
            self.calls[name] += bound.get("dropout_p", 0.0) > 0.0
            return func(**{**bound, "dropout_p": 0.0})
        if "dropout" in name:
            probability, training = (*args, *(None, None))[1:3]
            probability = kwargs.get("p", 0.5 if probability is None else probability)
            training = kwargs.get("training", kwargs.get("train", True if training is None else training))
            self.calls["dropout"] += bool(training and probability)
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)

    def _without_drop(self, module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        def kept(*args: Any, **kwargs: Any) -> Any:
            random, calls = torch.get_rng_state(), self.calls.copy()
            probe_args, probe_kwargs = detached((args, kwargs))
            output = forward(*args, **kwargs)
            inputs = [*args, *kwargs.values()]
            if not module.training or any(output is value for value in inputs):
                return output
            after, calls_after = torch.get_rng_state(), self.calls
            self.calls = calls
            index = _returned_in_eval(module, forward, probe_args, probe_kwargs)
            if index is None:
                self.calls = calls_after
                torch.set_rng_state(after)
                return output
            torch.set_rng_state(random)
            self.modules.add(module)
            return inputs[index]

        return kept


def attentions_that_drop(model: nn.Module) -> int:
    """Number of attention modules, torch's and those of captured graphs, with a dropout probability above 0."""
    return sum(isinstance(module, (nn.MultiheadAttention, Attention)) for module, _ in _probabilities(model))


def calls_that_drop(graph: CapturedGraph) -> Counter[str]:
    """``WithoutDropout.calls`` after a run of a captured graph, found without running it."""
    names = {Dropout: "dropout", Attention: "scaled_dot_product_attention"}
    droppers = [module for module in graph.modules() if isinstance(module, (Dropout, Attention)) and module.p > 0]
    return Counter(names[type(module)] for module in droppers)


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


def _may_drop(module: nn.Module) -> bool:
    """Whether a module has no children, parameters or buffers, as modules that only drop do."""
    members = (module.children(), module.parameters(), module.buffers())
    return not isinstance(module, torch.jit.ScriptModule) and not any(True for table in members for _ in table)


def _returned_in_eval(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int | None:
    """Index of the argument that ``module`` returns unchanged in eval mode; ``None`` if it returns none."""
    inputs = [*args, *kwargs.values()]
    versions = [version_of(value) if isinstance(value, Tensor) else 0 for value in inputs]
    module.training = False
    try:
        output = forward(*args, **kwargs)
    except Exception:  # a module may run in train mode only
        return None
    finally:
        module.training = True
    returned = (i for i, value in enumerate(inputs) if output is value and isinstance(value, Tensor))
    return next((i for i in returned if version_of(inputs[i]) == versions[i]), None)
