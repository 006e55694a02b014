"""A prepared model whose graph is cut into modules that are called."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from qtk.capture.holders import Holder
from qtk.capture.prepared_model import PreparedGraph
from qtk.graph.block_cut import WRITTEN, cut
from qtk.graph.captured_graph import HOME, LENT, VARIANTS, CapturedGraph
from qtk.graph.insert import quantizer_called
from qtk.graph.sites import prefixes
from qtk.nn.recomputation_guard import STATE_IS_RESTORED
from qtk.operators.targets import attribute, called_module
from qtk.quantizers.quantizer import Mode, Quantizer
from qtk.torch_private import MODULE_TABLES, OpOverload


class Block(Holder):
    """A part of a captured graph as a module, with the members of the module whose calls it computes.

    Its tables of members are ``holder``'s own: what is moved, trained, sharded or replaced in one is so in both.

    Args:
        holder: the module of the prepared model.
        recompute: whether its values are computed again in the backward pass.
    """

    def __init__(self, holder: nn.Module, *, recompute: bool) -> None:
        super().__init__()
        self.__dict__.update({name: value for name, value in vars(holder).items() if name not in vars(self)})
        self.__dict__.update({name: vars(holder)[name] for name in (*MODULE_TABLES, "training", "_path", "_constants")
                              if name in vars(holder)})
        self._recompute, self._current = recompute, 0
        self._codes: list[CapturedGraph] = []
        self._states: list[list[tuple[dict[str, Any], str]]] = []
        self._quantizers: list[list[Quantizer]] = []
        self._written: list[set[int]] = []

    def forward(self, *args: Any) -> Any:
        """Runs the graph of the current call."""
        code, quantizers = self._codes[self._current], self._quantizers[self._current]
        if not (self._recompute and torch.is_grad_enabled()) or any(q.mode is Mode.OBSERVE for q in quantizers):
            return code(*args)  # an observer would see a batch twice
        # the graph writes to its buffers behind the block, but autograd keeps the arguments as they are
        args = tuple(arg.clone() if index in self._written[self._current] else arg for index, arg in enumerate(args))
        moving = [vars(quantizer)["_buffers"] for quantizer in quantizers if not quantizer.repeatable]
        state = [*self._states[self._current], *((table, name) for table in moving for name in table)]
        if torch.compiler.is_compiling():  # which writes a batch norm's buffers once, but ranges before they are read
            return code(*args) if moving else checkpoint(code, *args, use_reentrant=False)
        if not state:
            return checkpoint(code, *args, use_reentrant=False)
        replay = _Replay(state)
        return checkpoint(code, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), replay))

    def _is_called(self) -> bool:
        return True

    def _take(self, codes: list[CapturedGraph]) -> None:
        """Sets the graphs of its calls."""
        self._codes, self._states = codes, [_state(code) for code in codes]
        self._quantizers = [_quantizers(code) for code in codes]
        self._written = [{index for index, node in enumerate(code.graph.find_nodes(op="placeholder"))
                          if node.meta[WRITTEN]} for code in codes]


def call_block(block: Block, index: int, *args: object) -> object:
    """Calls a block, which is to run the graph of its call with that index."""
    block._current = index
    return block(*args)


def _state(code: CapturedGraph) -> list[tuple[dict[str, Any], str]]:
    """Tables and names of the buffers that ``code`` gives to what is no op of torch's, such as a batch norm."""
    modules, state = [], []
    for node in code.graph.nodes:
        if node.op == "call_module" and quantizer_called(node) is None:
            modules.append(called_module(node))
        elif node.op == "get_attr" and any(_may_write(user) for user in node.users):
            owner, _, leaf = str(node.target).rpartition(".")
            if isinstance(value := attribute(code, str(node.target)), nn.Module):
                modules.append(value)
            elif leaf in (table := vars(code.get_submodule(owner))["_buffers"]):
                state.append((table, leaf))
    tables = [vars(inner)["_buffers"] for module in modules if module is not None for inner in module.modules()]
    return state + [(table, name) for table in tables for name in table]


def _quantizers(code: CapturedGraph) -> list[Quantizer]:
    """The quantizers that ``code`` calls, quantizers inside of composites too."""
    called = [module for node in code.graph.nodes if (module := called_module(node)) is not None]
    return [inner for module in called for inner in module.modules() if isinstance(inner, Quantizer)]


def _may_write(node: fx.Node) -> bool:
    return node.op != "output" and not isinstance(node.target, OpOverload) and quantizer_called(node) is None


class _Replay:
    """Context of a second computation: buffers are copies of what they were before the first, written to for nothing.

    Otherwise a batch would count twice, and a range that follows its values would have moved on.

    Args:
        state: tables and names of the buffers; as they are now.
    """

    def __init__(self, state: Collection[tuple[dict[str, Any], str]]) -> None:
        self._before = [(table, name, value.clone()) for table, name in state
                        if isinstance(value := table[name], Tensor)]
        self._actual: list[Tensor] = []

    def __enter__(self) -> None:
        self._token = STATE_IS_RESTORED.set(True)
        self._actual = [table[name] for table, name, _ in self._before]
        for table, name, value in self._before:
            table[name] = value.clone()  # a graph that is retained is computed a third time

    def __exit__(self, *error: object) -> None:
        for (table, name, _), buffer in zip(self._before, self._actual, strict=True):
            table[name] = buffer
        self._actual = []
        STATE_IS_RESTORED.reset(self._token)


class BlockView(nn.Module):
    """A prepared model whose graph is cut at modules, which are called: see ``qtk.block_view``.

    Args:
        model: the prepared model.
        paths: of the modules to cut at, none inside another.
        recompute: see ``Block``.

    Raises: CaptureError if a cut is not convex.
    """

    _model: PreparedGraph
    _outer: PreparedGraph
    _paths: tuple[str, ...]
    _blocks: dict[nn.Module, Block]
    _seen: list[int]
    _recompute: bool

    def __init__(self, model: PreparedGraph, paths: Collection[str], *, recompute: bool) -> None:
        super().__init__()
        self.__dict__.update(_model=model, _paths=tuple(paths), _recompute=recompute, _blocks={}, _seen=[])
        self.training = model.training
        self._refresh()
        self.register_state_dict_pre_hook(_refresh_first)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_refresh_first)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes what the prepared model computes."""
        if self._is_stale():
            refresh: Callable[[], None] = self._refresh
            if torch.compiler.is_compiling():  # outside the compiled code; the decorator would import the compiler
                refresh = torch.compiler.disable(refresh)  # type: ignore[no-untyped-call]
            refresh()
        return self._outer(*args, **kwargs)

    def named_blocks(self) -> dict[str, nn.Module]:
        """Path → block."""
        return {path: self._blocks[self._model.get_submodule(path)] for path in self._paths}

    def train(self, mode: bool = True) -> BlockView:
        """Sets the mode of the prepared model too."""
        super().train(mode)
        self._model.train(mode)  # last: it knows of frozen batch norms
        return self

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As ``nn.Module``, of the prepared model as it is now."""
        self._refresh()
        yield from super().named_modules(memo, prefix, remove_duplicate)

    def get_submodule(self, target: str) -> nn.Module:
        """The submodule at a path of the original, whatever attributes of a module have names on it."""
        name, _, rest = target.partition(".")
        child = self._modules.get(name)
        return super().get_submodule(target) if child is None else child.get_submodule(rest)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BlockView:
        self._model._apply(fn, recurse)
        return self

    def _is_stale(self) -> bool:
        return self._seen != [self._model.revision, *(graph.revision for graph in self._model.variants.values())]

    def _refresh(self) -> None:
        """Cuts the graphs again if they have changed: calibration may drop sites, a transform rewrite the model."""
        if not self._is_stale():
            return
        graphs = [self._model, *self._model.variants.values()]
        holders = {self._model.get_submodule(path): path for path in self._paths}
        codes: dict[nn.Module, list[CapturedGraph]] = {holder: [] for holder in holders}
        outer = [cut(graph, holders, codes, call_block) for graph in graphs]
        for holder, graphs_of_calls in codes.items():
            self._blocks.setdefault(holder, Block(holder, recompute=self._recompute))._take(graphs_of_calls)
        self._mirror()
        main, *variants = [_callable(self, code, graph) for code, graph in zip(outer, graphs, strict=True)]
        if variants:
            main.meta[VARIANTS] = dict(zip(self._model.variants, variants, strict=True))
        self.__dict__.update(_outer=main, _seen=[graph.revision for graph in graphs])

    def _mirror(self) -> None:
        """Takes over the tree of the prepared model, with blocks in the place of what they stand for."""
        everything = dict(self._model.named_modules(remove_duplicate=False))
        around = {everything[outer] for path, module in everything.items() if module in self._blocks
                  for outer in prefixes(path)[:-1]}
        twins: dict[nn.Module, nn.Module] = {self._model: self, **self._blocks}

        def twin(module: nn.Module) -> nn.Module:
            if module not in around:
                return twins.get(module, module)
            if module not in twins:
                twins[module] = copy.copy(module)  # which shares the tables
                twins[module].__dict__["_modules"] = members(module)
            return twins[module]

        def members(module: nn.Module) -> dict[str, nn.Module | None]:
            return {name: child and twin(child) for name, child in module._modules.items()}

        tables = {name: vars(self._model)[name] for name in MODULE_TABLES}
        self.__dict__.update({**tables, "_modules": members(self._model)})


def _refresh_first(view: BlockView, *_: object) -> None:
    view._refresh()


def _callable(view: BlockView, outer: Any, graph: CapturedGraph) -> PreparedGraph:
    """The outer graph of a cut as a module that takes the calls of ``graph``."""
    prepared = PreparedGraph(view, outer)
    prepared.meta.update({key: value for key, value in graph.meta.items() if key not in (HOME, LENT, VARIANTS)})
    return prepared
