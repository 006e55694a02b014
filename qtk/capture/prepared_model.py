"""``PreparedModel``, the result of ``prepare_model``: one captured graph, or the model's Python around several."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx.graph import PythonCode

from qtk.calls.calls import Call, cloned
from qtk.calls.containers import register_structure
from qtk.calls.inputs import as_captured, check_inputs, input_leaves, leaves_of_call, unequal_axes
from qtk.calls.served_sizes import SIZES, ServedSizes
from qtk.calls.signature import Kind, call_kind, input_names
from qtk.capture.bound_graph import Binding
from qtk.capture.known_calls import KnownCalls, captured_kind, fits, fixed_sizes
from qtk.capture.prepare_report import UNCALLED, PrepareReport
from qtk.capture.restored import PARENT
from qtk.errors import CaptureError
from qtk.graph.captured_graph import BOUND, CapturedGraph, is_watched
from qtk.graph.coverage import coverage
from qtk.graph.graphs import roots
from qtk.graph.sites import prefixes
from qtk.nn.eval_mode import fast_path_off, keep_frozen
from qtk.public import runs_model
from qtk.torch_private import MODULE_TABLES, call_structure, hooks, is_exporting, is_traced, pytree

Model = TypeVar("Model", bound="PreparedModel")

REPORT, SIGNATURE, KIND, EXAMPLES = "report", "qtk_signature", "qtk_kind", "qtk_examples"
WRITES, WARNED, ATTRIBUTES, SHAPES = "qtk_writes", "qtk_warned", "qtk_attributes", "qtk_shapes"
"""Keys of ``meta``: the report of the capture, the signature of the original's ``forward``, the kind of call that the
graph is of, the calls the model was captured with, whether the original writes to its inputs, whether ``train`` has
warned, what can be read of the original, the dynamic shapes of a model in Python, whose graphs know their own."""

KNOWN, CAPTURED = "qtk_known", "qtk_captured"
"""Attributes of a graph: calls that it, or a variant of it, is known to serve; name → kind of each placeholder."""


class PreparedModel(nn.Module):
    """Computes what the original model does, as a graph in which every quantizable value has a name.

    Parameters and buffers are the original's own objects, under their names.
    """

    meta: dict[str, Any]

    @property
    def examples(self) -> tuple[Call, ...]:
        """The calls it was captured with, one for each graph, moved and converted with it."""
        examples: tuple[Call, ...] = self.meta.get(EXAMPLES, ())
        return examples

    @property
    def example(self) -> Call | None:
        """The first of the calls it was captured with; ``None`` if it was traced without inputs."""
        return next(iter(self.examples), None)

    @property
    def report(self) -> PrepareReport:
        """The report of its capture, and of how much is quantized now."""
        report = self.meta[REPORT]
        assert isinstance(report, PrepareReport)
        return replace(report, covered=coverage(self))

    @property
    def original_type(self) -> type | None:
        """The class of the model that was captured; ``None`` where it is not known."""
        return None

    def train(self: Model, mode: bool = True) -> Model:
        """As torch's, but for batch norms that a ``QatSchedule`` has frozen; the first time warns of what the original
        does in train mode and this model does not.
        """
        if mode and self.meta[REPORT].train_notes and not self.meta.get(WARNED):
            self.meta[WARNED] = True
            warnings.warn("in train mode the prepared model is not the original:\n  "
                          + "\n  ".join(self.meta[REPORT].train_notes), stacklevel=2)
        super().train(mode)
        keep_frozen(self)
        return self

    def get_submodule(self, target: str) -> nn.Module:
        """Returns the submodule at a path of the original, even if an attribute of a prepared model has that name."""
        name, _, rest = target.partition(".")
        child = self._modules.get(name)
        return super().get_submodule(target) if child is None else child.get_submodule(rest)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        moved = [pytree.tree_map(lambda leaf: _like(leaf, fn), (call.args, call.kwargs)) for call in self.examples]
        self.meta[EXAMPLES] = tuple(Call(args, kwargs, None) for args, kwargs in moved)
        return self


def _like(leaf: object, fn: Callable[[Tensor], Tensor]) -> object:
    """A tensor with the device and dtype that ``fn`` gives it, and its own numbers, which ``to_empty`` would lose."""
    if not isinstance(leaf, Tensor):
        return leaf
    moved = fn(leaf.new_empty(0))
    return leaf if moved.is_meta else leaf.to(moved.device, moved.dtype)


def parameters_outside(model: PreparedModel) -> dict[str, str]:
    """Name → reason of every parameter that no captured graph holds."""
    held = {parameter for graph in roots(model).values() for parameter in graph.parameters()}
    parts = {part.path: part for part in model.report.parts}
    outside = {}
    for name, parameter in model.named_parameters():
        path = name
        while parameter not in held and name not in outside and path:
            path = path.rpartition(".")[0]
            if path in parts:
                reason = parts[path].reason
                outside[name] = f"its module is {parts[path].rung}" + ("" if reason is None else f": {reason}")
    return outside


def refuse_unreached(model: PreparedModel, exclude: Collection[str]) -> None:
    """Raises: CaptureError naming the modules with parameters that the example inputs did not call.

    Args:
        model: the model.
        exclude: paths or globs of modules that stay in float, reached or not, with all that is in them.
    """
    unreached = [part for part in model.report.parts if part.rung == UNCALLED and part.parameters
                 and not any(fnmatchcase(path, glob) for path in prefixes(part.path) for glob in exclude)]
    if unreached:
        listed = [f"{part.path} ({part.type_name}, {part.parameters} parameters)" for part in unreached]
        names = [part.path for part in unreached]
        raise CaptureError(
            "\n  ".join(["the example inputs do not reach these modules, which would stay in float:", *listed])
            + "\npass inputs that take the way to these experts or branches, or leave them in float by name: "
            f"qtk.prepare_model(model, example_inputs, modules_to_exclude={names}), or exclude: {names} in the config"
        )


class PreparedGraph(CapturedGraph, PreparedModel):
    """A model, or one island of a model, as a single graph.

    Raises: CaptureError when called with sizes or constants it was not captured for.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            graph = self.variant(args, kwargs)
            return super().__call__(*args, **kwargs) if graph is self else graph(*args, **kwargs)
        known: KnownCalls = self.__dict__.setdefault(KNOWN, KnownCalls())
        given, structure = pytree.tree_flatten((args, kwargs))
        found = known.find(structure, given)
        if found is None:
            graph = self.variant(args, kwargs)
            assert isinstance(graph, PreparedGraph)
            args, kwargs = graph._checked(args, kwargs)
            leaves = leaves_of_call(graph.graph, args, kwargs)
            known.add(graph, structure, given, leaves or (), self._before(graph))
        else:
            graph, leaves = found
        if graph is not self and not hooks(self) <= hooks(graph):
            warnings.warn(
                "the hooks of the model are not called: another graph serves calls of this kind (variants=); "
                "register them on qtk.block_view(sim, …), or on what all kinds of calls run", stacklevel=2,
            )
        bound = graph.__dict__.setdefault(BOUND, Binding())
        try:
            if leaves is None or is_watched() or (run := bound.function(graph)) is None:
                return nn.Module.__call__(graph, *args, **kwargs)
            return run(*leaves)
        except RuntimeError as error:
            unequal = unequal_axes(graph.graph, leaves or ()) if type(error) is RuntimeError else None
            if unequal is None:
                raise
            raise CaptureError(f"{error}\n{unequal}, which the captured graph has as one size, as they are in the "
                               "example: pass such inputs, or prepare the model from an example in which they "
                               "differ") from error

    def _checked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as this graph takes them. Raises: CaptureError if they are others than it was captured for."""
        args, kwargs = as_captured(self.graph, self.meta.get(SIGNATURE), args, kwargs)
        check_inputs(self.graph, args, kwargs, self.sizes)
        return args, kwargs

    @property
    def original_type(self) -> type | None:
        """As ``PreparedModel``."""
        attributes = self.meta.get(ATTRIBUTES)
        return None if attributes is None else attributes.kind

    @property
    def sizes(self) -> ServedSizes:
        """The sizes it serves, as far as known beyond the shapes of its placeholders."""
        sizes: ServedSizes = self.meta.get(SIZES, ServedSizes())
        return sizes

    def recompile(self) -> PythonCode:
        """As ``CapturedGraph``."""
        inputs = self.graph.find_nodes(op="placeholder")
        self.__dict__[CAPTURED] = {str(node.target): captured_kind(node) for node in inputs if "val" in node.meta}
        check = f"self.check_traced({', '.join(str(node.target) for node in inputs)})\n"
        sizes: ServedSizes = self.__dict__.get("meta", {}).get(SIZES, ServedSizes())
        limits = [f"if self.checks_limits() and not ({limit}): self.refuse_traced({str(limit)!r})\n"
                  for limit in sizes.limits]
        limits = ["import math\n" for _ in limits[:1]] + limits  # torch's conditions call its functions
        with self.graph.on_generate_code(lambda _: lambda lines: [check, *limits, *lines]):
            code = super().recompile()
        self.sign()
        return code

    def check_traced(self, *leaves: object) -> None:
        """Checks the values of the placeholders in code that is compiled or traced, which does not call this module.

        Raises: CaptureError if they are others than it was captured for.
        """
        captured = self.__dict__[CAPTURED]
        if not (torch.compiler.is_compiling() or is_traced()) or len(leaves) != len(captured):
            return
        given = dict(zip(captured, leaves, strict=True))
        for name, leaf in given.items():
            if not fits(leaf, captured[name]):
                raise CaptureError(f"input {name} has another shape, kind or value than when the model was captured; "
                                   "call the model outside of compiled code to read which, and prepare it for such "
                                   "inputs")
        self.sizes.assert_values(given)

    def checks_limits(self) -> bool:
        """Says whether its code is compiled or traced, but not by ``torch.export``, which asks for these limits."""
        return (torch.compiler.is_compiling() or is_traced()) and not is_exporting()

    def refuse_traced(self, limit: str) -> None:
        """Raises: CaptureError, of sizes that break a limit."""
        raise CaptureError(f"the captured graph computes what the model does only where {limit}; call it with such "
                           "sizes (pad or cut inputs), or prepare the model again for others")

    def __deepcopy__(self, memo: dict[int, object]) -> CapturedGraph:
        copied = super().__deepcopy__(memo)
        assert isinstance(copied, PreparedGraph)
        copied.recompile()  # its limits were not known before
        return copied

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        structure = call_structure(self.graph)
        for spec in () if structure is None else (structure.in_spec, structure.out_spec):
            register_structure(spec)

    def sign(self) -> None:
        """Gives ``forward`` the signature of the original's, which trainers read to know which inputs it takes."""
        signature = self.__dict__.get("meta", {}).get(SIGNATURE)
        if signature is not None:
            itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
            named = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
            vars(type(self).forward)["__signature__"] = signature.replace(parameters=[itself, *named])

    def __getattr__(self, name: str) -> Any:
        """Reads plain attributes of the original too. Raises: AttributeError saying where others are."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            attributes = self.__dict__.get("meta", {}).get(ATTRIBUTES)
            if attributes is None or name.startswith("_"):
                raise
            return attributes.read(name)

    def variant(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CapturedGraph:
        """The graph that serves calls with such arguments: itself, or one of its variants.

        Raises: CaptureError with the reason of each, if none does.
        """
        if not self.variants:
            return self
        of_kind = self._of_kind(call_kind(self.meta.get(SIGNATURE), args, kwargs))
        if len(of_kind) == 1:
            return of_kind[0]
        if torch.compiler.is_dynamo_compiling():
            return _traced_choice(of_kind, args, kwargs)
        reasons = []
        for graph in _fewest_sizes_first(self, *self.variants.values()):
            reason = graph.refusal(args, kwargs)
            if reason is None:
                return graph
            reasons.append(f"{', '.join(input_names(graph))}: {reason}")
        raise CaptureError("\n  ".join(["no graph serves calls with such inputs; the model has one for", *reasons])
                           + "\nadd these inputs to the variants of qtk.prepare_model or qtk.QuantSim")

    def _of_kind(self, kind: Kind) -> list[PreparedGraph]:
        """The graphs for calls of a kind; the first of them that takes the sizes of a call serves it."""
        return [graph for graph in _fewest_sizes_first(self, *self.variants.values()) if graph.meta.get(KIND) == kind]

    def _before(self, graph: CapturedGraph) -> list[tuple[Mapping[str, object], ServedSizes]]:
        """Returns what the graphs that take calls of the kind of ``graph`` first were captured for, and their sizes."""
        of_kind = self._of_kind(graph.meta.get(KIND)) if self.variants else []
        earlier = of_kind[:of_kind.index(graph)] if graph in of_kind else []
        return [(each.__dict__[CAPTURED], each.sizes) for each in earlier]

    def refusal(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CaptureError | None:
        """Returns why it does not serve a call; ``None`` if it does."""
        try:
            self._checked(args, kwargs)
        except CaptureError as error:
            return error
        return None

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[object]:
        """The values of the graph's inputs in a call of it, in order."""
        args, kwargs = as_captured(self.graph, self.meta.get(SIGNATURE), args, kwargs)
        return input_leaves(self.graph, args, kwargs)


def _traced_choice(of_kind: list[PreparedGraph], args: tuple[Any, ...], kwargs: dict[str, Any]) -> PreparedGraph:
    """The first graph that was captured for the shapes of a call, in code that is compiled; its own code checks limits.

    Raises: CaptureError if none is, or if a limit of sizes decides between several.
    """
    leaves = pytree.tree_leaves((args, kwargs))
    fitting = [graph for graph in of_kind if len(leaves) == len(graph.__dict__[CAPTURED])
               and all(fits(leaf, kind) for leaf, kind in zip(leaves, graph.__dict__[CAPTURED].values(), strict=True))]
    if fitting and (len(fitting) == 1 or not fitting[0].sizes.limits):
        return fitting[0]
    reason = (f"{len(fitting)} graphs are for these shapes, and a limit of sizes decides between them" if fitting else
              "no graph is for these shapes; call the model without torch.compile to read which inputs it takes")
    raise CaptureError(f"{reason}; compile without fullgraph=True, and the graph is found outside of compiled code")


def _fewest_sizes_first(*graphs: CapturedGraph) -> list[PreparedGraph]:
    """The graphs in the order in which they are asked for a call: of most fixed lengths, then of limits, first."""
    prepared = [graph for graph in graphs if isinstance(graph, PreparedGraph)]
    return sorted(prepared, key=lambda graph: (*fixed_sizes(graph.__dict__[CAPTURED]), bool(graph.sizes.limits)),
                  reverse=True)


class PreparedTree(PreparedModel):
    """A model that keeps its own Python, with captured graphs in place of some of its submodules.

    Reading or setting an attribute of the tree reads or sets the parent's attribute.

    Args:
        parent: a copy of the model whose submodules are graphs or stay Python.
    """

    def __init__(self, parent: nn.Module) -> None:
        super().__init__()
        self.meta = {}
        self.training = parent.training
        self.__dict__[PARENT] = parent  # not a submodule: its members are the members of this module
        if isinstance(parent, torch.jit.ScriptModule):  # its tables are no dicts
            self._modules = dict(parent.named_children())
            self._parameters = dict(parent.named_parameters(recurse=False))
            self._buffers = dict(parent.named_buffers(recurse=False))
        else:
            self.__dict__.update({name: parent.__dict__[name] for name in MODULE_TABLES})

    @property
    def original_type(self) -> type | None:
        """As ``PreparedModel``."""
        return type(self._parent)

    @runs_model
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model's own ``forward``."""
        self._parent.training = self.training
        if self.meta.get(WRITES):
            args, kwargs = cloned((args, kwargs))
        if torch.compiler.is_dynamo_compiling():
            return self._parent(*args, **kwargs)
        with fast_path_off():  # it would skip the islands
            return self._parent(*args, **kwargs)

    @runs_model
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            is_protocol = name.startswith("__")  # how to copy the parent is not how to copy its tree
            if is_protocol or "_parent" not in self.__dict__:
                raise
            return getattr(self.__dict__["_parent"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_protocol = name.startswith("__")  # fully_shard sets the class of what it shards
        is_own = is_protocol or "_parent" not in self.__dict__ or name in self.__dict__
        super().__setattr__(name, value) if is_own else setattr(self._parent, name, value)

    def __repr__(self) -> str:
        return repr(self._parent)
