"""A module captured as one ATen graph, whose parameters are edges and keep their names."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.fx.graph import PythonCode

from qtk.errors import CaptureError
from qtk.operators.targets import MEMBERS, MODULE_STACK
from qtk.torch_private import (
    GRAPH_MODULE_NAMES,
    MODULE_TABLES,
    function_modes,
    graph_from_bytes,
    graph_to_bytes,
    is_traced,
)

HOME, LENT, VARIANTS, CONSTANTS = "qtk_home", "qtk_lent", "qtk_variants", "qtk_constants"
"""Keys of ``meta``: device and dtype of a module without tensors; names of the attributes taken from the original;
kind of call → graph of the same module for such calls; names of the attributes that capture has decided."""

PICKLED_METADATA = ("custom", "val", MODULE_STACK)
"""What a pickled node keeps: its labels, the shape of its value, the modules around it."""
ACTING = "_qtk_acting"
"""Attribute of a module whose code is in a graph: name → path of the attribute that acts in the place of its own."""
REVISION = "qtk_revision"
"""Key of ``meta``: a number that no other code of a graph has had."""
BOUND = "qtk_bound"
"""Attribute of a graph: its method ``function`` says what a call runs in place of the graph, if anything."""
BOUND_NODES = "qtk_nodes"
"""Global of such a function: the node of each line, and their variables."""

_REVISIONS = itertools.count(1)

Home: TypeAlias = tuple[torch.device, torch.dtype]


def is_watched() -> bool:
    """Says whether a compiler, tracer, mode of torch or function transform is active, which sees single operators."""
    return torch.compiler.is_compiling() or is_traced() or function_modes() > 0


def is_decided(module: nn.Module, name: str, constants: Collection[str]) -> bool:
    """Says whether capture has decided the attribute ``name``, which is not so of a child that the graph calls."""
    child = module.__dict__.get("_modules", {}).get(name)
    return name in constants and (child is None or "_constants" in vars(child))


def _blank(kind: type[CapturedGraph]) -> CapturedGraph:
    """A graph module without members, for pickle to fill."""
    blank: CapturedGraph = kind.__new__(kind)
    return blank


def _not_picklable(name: str, error: Exception) -> CaptureError:
    return CaptureError(f"a prepared model cannot be pickled if {name} cannot: {type(error).__name__}: {error}; "
                        "write its state_dict, or the simulation by sim.save(directory)")


def without_effect(holder: nn.Module, path: str, name: str) -> CaptureError:
    """The error for setting an attribute of the original that the captured code no longer reads."""
    place = f"{path}.{name}" if path else name
    acting = [child for child, module in holder.named_children() if name in vars(module)]
    beside = ".".join(filter(None, (path, acting[0], name))) if acting else vars(holder).get(ACTING, {}).get(name)
    way = "" if beside is None else f"set {beside!r}, or "
    return CaptureError(f"setting {place!r} would have no effect: the prepared model runs its graph, in which it is "
                        f"what it was at capture; {way}set it on the original model and prepare that again")


class CapturedGraph(fx.GraphModule):
    """A graph module that is called, trained, moved and copied like the module it was captured from.

    Parameters and buffers are the original's own objects: training or moving one changes the other;
    ``copy.deepcopy`` separates them. Tensors that the captured code creates (``torch.arange`` and the like) follow
    ``.to()``: their device always, their dtype if it is the floating dtype of the model.

    Args:
        root: holds every parameter and buffer, whether the graph reads it or not.
        graph: the captured code.

    Raises: CaptureError when pickled with something that cannot be.
    """

    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        super().__init__(nn.Module(), fx.Graph())  # which would copy into itself what the graph reads
        self.adopt(root.__dict__)
        self.training = root.training
        for node in graph.nodes:
            if node.op in ("get_attr", "call_module"):
                node.target = self.target(str(node.target))
        self.graph = graph

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self.__dict__.get(BOUND)
        run = None if bound is None or kwargs or is_watched() else bound.function(self)
        return super().__call__(*args, **kwargs) if run is None else run(*args)

    def __deepcopy__(self, memo: dict[int, object]) -> CapturedGraph:
        copied = super().__deepcopy__(memo)
        assert isinstance(copied, CapturedGraph)
        for name in self.meta.get(LENT, ()):
            copied.__dict__[name] = copy.deepcopy(self.__dict__[name], memo)
        return copied

    def _deepcopy_init(self) -> Callable[..., None]:
        return CapturedGraph.__init__

    def __reduce__(self) -> tuple[Callable[..., object], tuple[type], dict[str, object]]:
        """Pickles the graph with the labels of its nodes, which ``fx.GraphModule`` would trace anew and lose.

        Raises: CaptureError naming what cannot be pickled.
        """
        plain = {name: self.__dict__[name] for name in self.meta.get(LENT, ())}
        plain |= {name: value for name, value in self.meta.items() if name != VARIANTS}
        for name, value in plain.items():
            try:
                pickle.dumps(value)
            except Exception as error:
                raise _not_picklable(name, error) from error
        try:
            graph = graph_to_bytes(self.graph, PICKLED_METADATA)
        except Exception as error:
            raise _not_picklable("its graph", error) from error
        members = {name: value for name, value in self.__dict__.items() if name not in GRAPH_MODULE_NAMES}
        return _blank, (type(self).__mro__[1],), {"members": members, "graph": graph}  # [0] is of this instance alone

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state["members"])
        self.graph = graph_from_bytes(state["graph"])

    def __setattr__(self, name: str, value: object) -> None:
        """Raises: CaptureError for a constant of the captured code."""
        hides = self._hides(name)
        if hides and not isinstance(value, (nn.Module, Tensor)):  # fx sets its own
            object.__setattr__(self, name, value)
            return
        is_new_module = isinstance(value, nn.Module) and name not in self.__dict__.get("_modules", ())
        if is_decided(self, name, self.__dict__.get("meta", {}).get(CONSTANTS, ())) and not is_new_module:
            raise without_effect(self, "", name)
        nn.Module.__setattr__(self.__dict__[MEMBERS] if hides else self, name, value)  # type: ignore[arg-type]

    def recompile(self) -> PythonCode:
        """As ``fx.GraphModule``, after every edit of the graph."""
        if "meta" in self.__dict__:  # not yet while it is constructed
            self.meta[REVISION] = next(_REVISIONS)
        return super().recompile()

    @property
    def revision(self) -> int:
        """A number that changes when the graph does."""
        revision: int = self.meta[REVISION]
        return revision

    @property
    def variants(self) -> dict[Hashable, CapturedGraph]:
        """Kind of call → another graph of the same module, with the same members, for such calls."""
        variants: dict[Hashable, CapturedGraph] = self.meta.get(VARIANTS, {})
        return variants

    def lend_attributes(self, original: nn.Module) -> None:
        """Takes over the plain attributes of ``original`` and its submodules, which outside code may read."""
        for path, module in original.named_modules():
            holder = self.get_submodule(path)
            lent = {
                name: value for name, value in vars(module).items()
                if not name.startswith("_") and not hasattr(holder, name)
            }
            holder.__dict__.update(lent)
            if holder is self:
                self.meta[LENT] = tuple(lent)

    def adopt(self, registries: Mapping[str, object]) -> None:
        """Uses the tables of another module; ``fx.GraphModule`` keeps only members that its graph reads."""
        tables = {name: registries[name] for name in MODULE_TABLES}
        members = nn.Module()
        members.__dict__.update(tables)
        self.__dict__.update({**tables, MEMBERS: members})

    def target(self, path: str) -> str:
        """The target of a node that reads or calls what is at ``path``, a name of the original."""
        return f"{MEMBERS}.{path}" if self._hides(path.partition(".")[0]) else path

    def _hides(self, name: str) -> bool:
        """Says whether a member called ``name`` is not the attribute of that name."""
        return any(name in self.__dict__.get(table, ()) for table in MODULE_TABLES) and (
            name in self.__dict__ or name in GRAPH_MODULE_NAMES or hasattr(type(self), name)
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CapturedGraph:
        before = self._home()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._anchor() is None:  # no tensor shows what fn does
            moved = fn(torch.empty(0, device=before[0], dtype=before[1]))
            self.meta[HOME] = (moved.device, moved.dtype)
        if self._home() != before:
            for graph in (self, *self.variants.values()):
                graph._retarget(before, self._home())
        return self

    def _home(self) -> Home:
        anchor = self._anchor()
        if anchor is None:
            home: Home = self.meta.get(HOME, (torch.device("cpu"), torch.float32))
            return home
        return anchor.device, anchor.dtype

    def _anchor(self) -> Tensor | None:
        tensors = [*self.parameters(), *self.buffers()]
        return next((tensor for tensor in tensors if tensor.is_floating_point()), next(iter(tensors), None))

    def _retarget(self, before: Home, after: Home) -> None:
        """Rewrites the device and dtype arguments of the graph's ops."""
        (_, old_dtype), (device, dtype) = before, after
        changed = False
        for node in self.graph.nodes:
            if node.op != "call_function":
                continue
            kwargs = dict(node.kwargs)
            if kwargs.get("device") is not None:
                kwargs["device"] = device
            if kwargs.get("dtype") == old_dtype and old_dtype.is_floating_point:
                kwargs["dtype"] = dtype
            if kwargs != node.kwargs:
                node.kwargs = kwargs
                changed = True
        if changed:
            self.recompile()
