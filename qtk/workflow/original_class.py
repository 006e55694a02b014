"""``to_original``: the simulation as a model of the user's own class, with its methods, ``generate`` among them."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from qtk.calls.call_kind import signature_of
from qtk.calls.containers import is_cache
from qtk.capture.prepared_model import PreparedModel
from qtk.capture.skeleton import SKELETON, Skeleton
from qtk.capture.verify_prepared import output_difference
from qtk.errors import CaptureError, VerificationError
from qtk.graph.graphs import entered, graphs, roots
from qtk.graph.insert import quantizer_nodes
from qtk.graph.parameter_readers import memory_of, parameter_readers
from qtk.graph.simulation import Simulation
from qtk.nn.eval_mode import evaluating
from qtk.public import public
from qtk.quantizers.modes import caching
from qtk.quantizers.quantizer import Mode
from qtk.torch_private import call_structure, pytree

SIMULATION = "simulation"
"""The submodule of a model of the user's class that runs its simulation."""

FLAGS = ("use_cache", "return_dict")
"""Arguments of transformers' models that a captured graph has decided, and that ``generate`` passes all the same."""


@public
def to_original(simulation: Simulation) -> nn.Module:
    """A model of the class that was prepared, which computes what the simulation computes.

    >>> import qtk
    >>> model, x = nn.Sequential(nn.Linear(8, 4)).eval(), torch.randn(16, 8)
    >>> sim = qtk.QuantSim(model, x, activation_bits=None)
    >>> sim.compute_encodings(None)
    >>> same = sim.to_original()
    >>> type(same), torch.equal(same(x), sim.model(x))
    (<class 'torch.nn.modules.container.Sequential'>, True)

    Where parameters alone are quantized it is the user's class with the simulated values as parameters, tensors of its
    own: save it, run it, train it. Else it is an instance of a class derived from it, whose ``forward`` runs the
    simulation, and which shares its parameters: all other methods are the user's, such as ``generate``.

    Args:
        simulation: calibrated; left as it is.

    Raises: CaptureError if the class cannot be made again; NotCalibratedError naming a weight without an encoding;
        VerificationError if the result computes something else than the simulation.
    """
    model = simulation.model
    assert isinstance(model, PreparedModel)
    skeleton = model.meta.get(SKELETON)
    if not isinstance(skeleton, Skeleton):
        raise CaptureError("the model was prepared without inputs; make the simulation from the float model itself")
    tensors = _simulated_tensors(model)
    if tensors is None:
        return _running(model, skeleton)
    made = skeleton.filled(tensors).train(model.training)
    for call in model.examples:
        try:
            output_difference(model, made, call.args, call.kwargs)
        except VerificationError as error:
            raise VerificationError(f"{type(made).__name__} with the simulated weights computes something else than "
                                    f"the simulation: {error}; something was rewritten in the graph alone") from None
    return made


def _simulated_tensors(model: PreparedModel) -> dict[str, Tensor] | None:
    """Name → copy of each tensor of the model, quantized where it is; ``None`` if more than parameters is quantized."""
    if any(quantizer.mode is not Mode.BYPASS and (node.all_input_nodes[0].op != "get_attr" or len(node.args) > 1)
           for graph in graphs(model).values() for node, quantizer in quantizer_nodes(graph).items()):
        return None
    readers = parameter_readers(model)
    if any(len(several) > 1 for several in readers.values()):
        return None
    held: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    held |= dict(model.named_buffers(remove_duplicate=False))
    copies: dict[int, Tensor] = {}
    with torch.no_grad(), evaluating(model):
        for value in held.values():
            quantizer = next(iter(readers.get(memory_of(value), ())), None)
            if id(value) not in copies:
                simulated = (value if quantizer is None else quantizer(value)).detach().clone()
                is_parameter = isinstance(value, nn.Parameter)
                copies[id(value)] = nn.Parameter(simulated, value.requires_grad) if is_parameter else simulated
    return {name: copies[id(value)] for name, value in held.items()}


def _running(model: PreparedModel, skeleton: Skeleton) -> nn.Module:
    """A model of a class derived from the user's, whose ``forward`` runs ``model``."""
    root, accepted = skeleton.root, _accepted(model)
    kind = type(root)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__,
             "forward": _forward(root, accepted), "__getattr__": _refuse}
    if callable(generate := getattr(kind, "generate", None)):
        names["generate"] = _generating(generate)
    made: nn.Module = kind.__new__(type(kind.__name__, (kind,), names))
    made.__dict__.update({name: copy.copy(value) if isinstance(value, dict) else value
                          for name, value in vars(root).items()})
    made.__dict__["_parameters"], made.__dict__["_buffers"] = {}, {}
    made.__dict__["_modules"] = {SIMULATION: model}
    made.training = model.training
    settings = vars(root).get("generation_config")
    if settings is not None and _cache_argument(model) is None:
        settings = made.__dict__["generation_config"] = copy.copy(settings)
        settings.use_cache = False  # no graph takes one: each token is computed from all before it
    return made


def _generating(generate: Callable[..., Any]) -> Callable[..., Any]:
    """``generate`` with each weight quantized once: nobody else changes it between two tokens."""

    @functools.wraps(generate)
    def with_weights_kept(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with caching(cast(nn.Module, self._modules[SIMULATION])):
            return generate(self, *args, **kwargs)

    return with_weights_kept


def _refuse(self: nn.Module, name: str) -> Any:
    """Raises: AttributeError for what is not there, saying that submodules are in the graph."""
    try:
        return type(self).__mro__[1].__getattr__(self, name)  # type: ignore[attr-defined]
    except AttributeError:
        raise AttributeError(f"this {type(self).__name__} runs a simulation and has no {name!r}: its submodules are in "
                             "the graph") from None


def _forward(root: nn.Module, accepted: Collection[str]) -> Callable[..., Any]:
    signature = signature_of(root)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _run(self._modules[SIMULATION], signature, accepted, args, kwargs)

    if signature is not None:
        known = [parameter for name, parameter in signature.parameters.items()
                 if name in (*accepted, *FLAGS) or parameter.kind is inspect.Parameter.VAR_KEYWORD]
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        vars(forward)["__signature__"] = signature.replace(parameters=[itself, *known])
    return forward


def _run(
    model: nn.Module | None, signature: inspect.Signature | None, accepted: Collection[str], args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Runs a simulation with the arguments that the user's class takes; without those that say nothing."""
    assert isinstance(model, PreparedModel)
    bound = {} if signature is None else signature.bind_partial(*args).arguments
    if args and len(bound) != len(args):  # *args, or no signature
        return model(*args, **kwargs)
    arguments = {**bound, **kwargs}
    wants_cache = arguments.get("use_cache") is not False
    taken = {name: value for name, value in arguments.items() if not _says_nothing(name, value, accepted)}
    for name in [name for name, value in taken.items() if is_cache(value) and not _is_filled(value)]:
        del taken[name]  # the graph takes an empty cache of the class of its example, or none
    taken = {**_empty_caches(model), **taken}
    output = model(**taken)
    return output if wants_cache else _without_cache(output)


def _says_nothing(name: str, value: object, accepted: Collection[str]) -> bool:
    """Whether an argument that no graph takes is as if it was left out."""
    if name in accepted:
        return value is None
    return value is None or name in FLAGS or (
        name.endswith("attention_mask") and isinstance(value, Tensor) and bool((value == 1).all()))


def _empty_caches(model: PreparedModel) -> dict[str, Any]:
    """The arguments of the examples that are caches of no token yet."""
    return {name: value for call in model.examples for name, value in call.kwargs.items()
            if is_cache(value) and not _is_filled(value)}


def _is_filled(cache: object) -> bool:
    """Whether a cache holds a state of some token."""
    return any(isinstance(leaf, Tensor) and leaf.ndim > 1 and leaf.numel() for leaf in pytree.tree_leaves(cache))


def _without_cache(output: Any) -> Any:
    if not isinstance(output, Mapping):
        return output
    kept: Any = type(output)
    return kept(**{name: value for name, value in output.items() if not is_cache(value)})


def _accepted(model: PreparedModel) -> set[str]:
    """The names of the arguments that one of the graphs takes; all that the examples have where Python is kept."""
    names: set[str] = set()
    for graph in entered(model) if "" in roots(model) else ():
        structure = call_structure(graph.graph) if isinstance(graph, torch.fx.GraphModule) else None
        names |= {*structure.orig_args} if structure is not None else set()
    for call in model.examples:
        names |= {*call.kwargs}
        signature = signature_of(model)
        names |= set() if signature is None else {*signature.bind_partial(*call.args).arguments}
    return names - {"self"}


def _cache_argument(model: PreparedModel) -> str | None:
    """The name of the argument by which a graph takes a filled cache; ``None`` if none does."""
    return next((name for call in model.examples for name, value in call.kwargs.items()
                 if is_cache(value) and _is_filled(value)), None)
