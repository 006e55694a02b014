"""``to_original``: the simulation as a model of the user's own class, with its methods, ``generate`` among them."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from qtk.calls.calls import Call, detached
from qtk.calls.containers import is_cache
from qtk.calls.signature import signature_of
from qtk.capture.bound_graph import weights_once
from qtk.capture.prepared_model import PreparedModel
from qtk.capture.skeleton import SKELETON, Skeleton
from qtk.capture.verify_prepared import output_difference
from qtk.errors import CaptureError, VerificationError
from qtk.graph.captured_graph import CapturedGraph
from qtk.graph.graphs import entered, graphs
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

"""Its attribute by which ``generate`` runs that faster."""

USE_CACHE, RETURN_DICT, LOGITS_TO_KEEP = FLAGS = ("use_cache", "return_dict", "logits_to_keep")
"""Arguments of transformers' models that a captured graph has decided, and that ``generate`` passes all the same."""

SETTINGS = "generation_config"
"""The attribute, and the argument of ``generate``, that holds what a call leaves out."""

LOGITS = "logits"
"""Name of the output of which ``logits_to_keep`` asks for the last tokens: [batch, tokens, words]."""

SAVING = ("save", "push_to_hub")
"""Names of methods that write a model, which others go on with ``_``: ``save_pretrained``."""


@dataclass(frozen=True, slots=True)
class Interface:
    """How the user's class is called.

    Args:
        signature: the signature of its ``forward``; ``None`` if it has none.
        accepted: the names of the arguments that one of the graphs takes.
        defaults: flag → its value where a call leaves it out; ``None`` where a config decides.
        empty_caches: the arguments of the examples that are caches of no token yet.
    """

    signature: inspect.Signature | None
    accepted: Collection[str]
    defaults: Mapping[str, object]
    empty_caches: Mapping[str, object]


@public
def to_original(simulation: Simulation) -> nn.Module:
    """Returns a model of the class that was prepared, which computes what the simulation computes.

    >>> import qtk
    >>> model, x = nn.Sequential(nn.Linear(8, 4)).eval(), torch.randn(16, 8)
    >>> sim = qtk.QuantSim(model, x, activation_bits=None)
    >>> sim.compute_encodings(None)
    >>> same = sim.to_original()
    >>> type(same), torch.equal(same(x), sim.model(x))
    (<class 'torch.nn.modules.container.Sequential'>, True)

    Where parameters alone are quantized it is the user's class with the simulated values as parameters, tensors of its
    own: save it, run it, train it. Else it is an instance of a class derived from it, whose ``forward`` runs the
    simulation, and which shares its parameters: all other methods are the user's, such as ``generate``, not methods
    that save: its tensors have other names. ``sim.save`` and ``sim.export`` write it.

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
        made, what = _running(model, skeleton), "whose forward runs the simulation"
    else:
        made, what = skeleton.filled(tensors).train(model.training), "with the simulated weights"
    for call in model.examples:
        try:
            output_difference(model, made, call.args, call.kwargs)
        except VerificationError as error:
            raise VerificationError(f"{type(made).__name__} {what} computes something else than the simulation: "
                                    f"{error}; something was rewritten in the graph alone") from None
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
    root = skeleton.empty()
    kind, interface = type(root), _interface(root, model)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__,
             "forward": _forward(interface), "__getattr__": _refusing(kind), **_without_saving(kind)}
    settings, keeps_cache = vars(root).get(SETTINGS), _takes_cache(model, interface.signature)
    if callable(generate := getattr(kind, "generate", None)):
        names["generate"] = _generating(generate, keeps_cache=keeps_cache)
    made: nn.Module = kind.__new__(type(kind.__name__, (kind,), names))
    made.__dict__.update(vars(root))
    made.__dict__["_parameters"], made.__dict__["_buffers"] = {}, {}
    made.__dict__["_modules"] = {SIMULATION: model}
    made.training = model.training
    if settings is not None and not keeps_cache:
        settings.use_cache = False
    return made


def _generating(generate: Callable[..., Any], *, keeps_cache: bool) -> Callable[..., Any]:
    """``generate`` with bound graphs, and each weight quantized once: nobody else changes these between two tokens.

    Where no graph takes a cache, each token is computed from all before it, whatever a call or its settings ask for.
    """

    @functools.wraps(generate)
    def with_bound_graphs(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        simulation = cast(nn.Module, self._modules[SIMULATION])
        if not keeps_cache:
            given = kwargs.get(SETTINGS)
            if getattr(given, USE_CACHE, None):
                kwargs[SETTINGS] = copy.copy(given)
                setattr(kwargs[SETTINGS], USE_CACHE, False)
            if kwargs.get(USE_CACHE):
                kwargs[USE_CACHE] = False
        with caching(simulation), weights_once(simulation):
            return generate(self, *args, **kwargs)

    return with_bound_graphs


def _refusing(kind: type) -> Callable[[nn.Module, str], Any]:
    """``__getattr__`` of a class derived from ``kind``, which says of what is not there that it is in the graph."""

    def refuse(self: nn.Module, name: str) -> Any:
        try:
            return kind.__getattr__(self, name)  # type: ignore[attr-defined]
        except AttributeError:
            raise AttributeError(f"this {type(self).__name__} runs a simulation and has no {name!r}: its submodules "
                                 "are in the graph") from None

    return refuse


def _without_saving(kind: type) -> dict[str, Callable[..., Any]]:
    """The methods of the user's that save a model, by their names, as methods that refuse to."""

    def refusing(name: str) -> Callable[..., Any]:
        def refuse(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            raise CaptureError(f"{name} of this {type(self).__name__} would write the tensors of a simulation, by "
                               f"names that {kind.__name__} does not have; write it with sim.export(directory), or "
                               "with sim.save(directory) to go on later")

        return refuse

    begins = tuple(f"{verb}_" for verb in SAVING)
    return {name: refusing(name) for name in dir(kind)
            if f"{name}_".startswith(begins) and not hasattr(nn.Module, name) and callable(getattr(kind, name))}


def _interface(root: nn.Module, model: PreparedModel) -> Interface:
    signature = signature_of(root)
    parameters = {} if signature is None else signature.parameters
    defaults = {name: parameters[name].default for name in FLAGS if name in parameters}
    return Interface(signature, _accepted(model, signature), defaults, _empty_caches(model, signature))


def _forward(interface: Interface) -> Callable[..., Any]:
    signature = interface.signature

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _run(self._modules[SIMULATION], interface, args, kwargs)

    if signature is not None:
        known = [parameter for name, parameter in signature.parameters.items()
                 if name in (*interface.accepted, *FLAGS) or parameter.kind is inspect.Parameter.VAR_KEYWORD]
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        vars(forward)["__signature__"] = signature.replace(parameters=[itself, *known])
    return forward


def _run(model: nn.Module | None, interface: Interface, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs a simulation with the arguments that the user's class takes, without arguments that say nothing."""
    assert isinstance(model, PreparedModel)
    signature = interface.signature
    by_position = {} if signature is None or not args else signature.bind_partial(*args).arguments
    if args and len(by_position) != len(args):  # *args, or no signature
        return model(*args, **kwargs)
    arguments = {**by_position, **kwargs}
    taken = {name: value for name, value in arguments.items() if not _says_nothing(name, value, interface.accepted)}
    if isinstance(model, CapturedGraph):  # it takes an empty cache of the class of its example, or none; Python any
        filled = {name: value for name, value in taken.items() if not is_cache(value) or _is_filled(value)}
        empty = {name: value for name, value in interface.empty_caches.items() if name not in filled}
        taken = {**detached(empty), **filled}
    flags = {name: arguments[name] for name in FLAGS
             if name not in interface.accepted and arguments.get(name) is not None}
    return _as_asked(model(**taken), interface, flags)


def _says_nothing(name: str, value: object, accepted: Collection[str]) -> bool:
    """Says whether an argument that no graph takes is as if it was left out."""
    if name in accepted:
        return value is None
    return value is None or name in FLAGS or (
        name.endswith("attention_mask") and isinstance(value, Tensor) and bool((value == 1).all()))


def _as_asked(output: Any, interface: Interface, flags: Mapping[str, object]) -> Any:
    """The output as ``flags`` ask for it, the arguments of a call that no graph takes.

    Raises: CaptureError if the output that was captured is another one.
    """
    for name, value in flags.items():
        captured = interface.defaults.get(name)
        if not isinstance(value, Tensor) and value == captured:
            continue
        if name == USE_CACHE:
            has_cache = _has_cache(output)
            is_served = has_cache or (captured is None and not value)
            output = output if value or not has_cache else _without_cache(output)
        elif name == LOGITS_TO_KEEP:
            logits = output.get(LOGITS) if isinstance(output, Mapping) else None
            is_served = captured == 0 and isinstance(value, int) and isinstance(logits, Tensor)
            if isinstance(logits, Tensor) and is_served:
                output[LOGITS] = logits[:, -value:]  # type: ignore[operator]
        else:
            is_served = captured is None and bool(value) is isinstance(output, Mapping)
        if not is_served:
            raise CaptureError(f"{name}={value!r}, but the model was captured with another value, which is written "
                               f"into its graph; leave {name} out, or make the simulation from inputs with "
                               f"{name}={value!r}")
    return output


def _arguments(call: Call, signature: inspect.Signature | None) -> dict[str, Any]:
    """Name → argument of a call, however it is given."""
    return {**({} if signature is None else signature.bind_partial(*call.args).arguments), **call.kwargs}


def _empty_caches(model: PreparedModel, signature: inspect.Signature | None) -> dict[str, Any]:
    """The arguments of the examples that are caches of no token yet."""
    return {name: value for call in model.examples for name, value in _arguments(call, signature).items()
            if is_cache(value) and not _is_filled(value)}


def _takes_cache(model: PreparedModel, signature: inspect.Signature | None) -> bool:
    """Says whether a graph takes a filled cache."""
    return any(is_cache(value) and _is_filled(value)
               for call in model.examples for value in _arguments(call, signature).values())


def _is_filled(cache: object) -> bool:
    """Says whether a cache holds a state of some token."""
    return any(isinstance(leaf, Tensor) and leaf.ndim > 1 and leaf.numel() for leaf in pytree.tree_leaves(cache))


def _has_cache(output: object) -> bool:
    """Says whether an output holds caches."""
    values = output.values() if isinstance(output, Mapping) else output if type(output) is tuple else ()
    return any(map(is_cache, values))


def _without_cache(output: Any) -> Any:
    """An output without the caches in it."""
    kind: Any = type(output)
    if isinstance(output, Mapping):
        return kind(**{name: value for name, value in output.items() if not is_cache(value)})
    return tuple(value for value in output if not is_cache(value))


def _accepted(model: PreparedModel, signature: inspect.Signature | None) -> set[str]:
    """The names of the arguments that one of the graphs takes; all that the examples have where Python is kept."""
    names: set[str] = set()
    for graph in entered(model) if isinstance(model, CapturedGraph) else ():
        structure = call_structure(graph.graph) if isinstance(graph, CapturedGraph) else None
        names |= {*structure.orig_args} if structure is not None else set()
    for call in model.examples:
        names |= {*_arguments(call, signature)}
    return names - {"self"}
