"""``block_view``: a simulation as modules that are called."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import fx, nn

from qtk.capture.block_view import BlockView
from qtk.capture.prepared_model import PreparedGraph, PreparedModel
from qtk.errors import CaptureError
from qtk.graph.graphs import graphs
from qtk.graph.insert import QUANTIZERS
from qtk.graph.simulation import HasSimulation
from qtk.graph.sites import prefixes
from qtk.operators.targets import attribute, called_module, module_calls
from qtk.public import public
from qtk.registry import nearest


@public
def block_view(
    sim: HasSimulation | PreparedModel, blocks: Iterable[str] | str, *, checkpoint: bool = False
) -> BlockView:
    """Returns a view of a simulation's model, cut at modules that are called again: for hooks, FSDP, recomputation.

    >>> import qtk, torch
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 8)), nn.Linear(8, 2)).eval()
    >>> x = torch.randn(16, 4)
    >>> sim = qtk.QuantSim(net, x)
    >>> sim.compute_encodings([x], progress=False)
    >>> view = qtk.block_view(sim, "1")
    >>> torch.equal(view(x), sim.model(x))
    True

    It shares parameters, buffers and quantizers with the simulation: train either, save ``sim``.

    >>> all(a is b for a, b in zip(view.parameters(), sim.model.parameters(), strict=True))
    True
    >>> list(view.state_dict()) == list(sim.model.state_dict())
    True

    Hooks on a block fire, e.g. for feature distillation; they see what is quantized:

    >>> features = []
    >>> handle = view.get_submodule("1").register_forward_hook(lambda block, args, output: features.append(output))
    >>> view(x).shape, features[0].shape
    (torch.Size([16, 2]), torch.Size([16, 8]))

    With ``checkpoint=True`` every block computes its values again in the backward pass, instead of keeping them:

    >>> recomputing = qtk.block_view(sim, ["0", "1"], checkpoint=True)
    >>> recomputing(x).sum().backward()

    FSDP, one block at a time: ``for block in view.named_blocks().values(): fully_shard(block)``, then
    ``fully_shard(view)``.

    A block takes the values that enter it by position, float activations first, and returns values that leave it, the
    float tensor made last in front. The view follows the simulation when that is calibrated or transformed later.

    Args:
        sim: a ``QuantSim``, or a prepared model.
        blocks: module paths or globs over them (``*`` matches dots too); of nested matches the outermost is taken.
        checkpoint: recompute by ``torch.utils.checkpoint``, without reentry; random numbers are drawn again as they
            were, batch norms count a batch once, ranges follow it once.

    Raises: CaptureError if a path matches nothing that can be cut, a cut is not convex (what leaves a block enters it
        again), or the model could not be captured as one graph.
    """
    model = _one_graph(sim)
    return BlockView(model, _selected(model, [blocks] if isinstance(blocks, str) else list(blocks)),
                     recompute=checkpoint)


def _one_graph(sim: HasSimulation | PreparedModel) -> PreparedGraph:
    """The model. Raises: CaptureError if it is none, or not one graph."""
    model = sim if isinstance(sim, PreparedModel) else getattr(getattr(sim, "simulation", None), "model", None)
    if not isinstance(model, PreparedModel):
        raise CaptureError(f"block_view takes a QuantSim or a prepared model, got {type(sim).__name__}; pass "
                           "QuantSim(model, example_inputs)")
    if not isinstance(model, PreparedGraph):
        islands = [path for path in graphs(model) if "@" not in path]
        raise CaptureError(
            "the model keeps its Python and calls its graphs, islands, as modules, on which hooks, "
            f"torch.utils.checkpoint and fully_shard act as they are: {', '.join(islands)}"
        )
    if not model.report.complete:
        raise CaptureError("the model was traced without inputs; pass example_inputs to prepare_model")
    return model


def _selected(model: PreparedGraph, globs: list[str]) -> list[str]:
    """The paths to cut at: what each glob matches that is called, else lists of such; the outermost of nested ones.

    Raises: CaptureError naming a glob without one.
    """
    nodes = [node for graph in (model, *model.variants.values()) for node in graph.graph.nodes]
    used = [called_module(node) if node.op == "call_module" else _module_read(node) for node in nodes]
    as_it_is = {inner for module in used if module is not None for inner in module.modules()}
    called = {call.path for node in nodes for call in module_calls(node)}
    computing = {outer for path in called for outer in prefixes(path)}
    modules = {path: module for path, module in model.named_modules(remove_duplicate=False)
               if path and path.partition(".")[0] != QUANTIZERS and module not in as_it_is}
    selected: dict[nn.Module, str] = {}
    if not globs or not all(isinstance(glob, str) for glob in globs):
        raise CaptureError(f"block_view takes the paths of modules to cut at, one or more, got {globs!r}")
    for glob in globs:
        matched = [path for path in modules if fnmatchcase(path, glob)]
        cuttable = [path for path in matched if path in called] or [path for path in matched if path in computing]
        if not cuttable:
            raise CaptureError(_nothing(glob, matched, [path for path in modules if path in computing], model))
        for path in cuttable:
            selected.setdefault(modules[path], path)
    paths = set(selected.values())
    return [path for path in selected.values() if paths.isdisjoint(prefixes(path)[:-1])]


def _module_read(node: fx.Node) -> nn.Module | None:
    """The module that a node reads as an attribute, ``None`` if it reads none."""
    owner = node.graph.owning_module
    value = attribute(owner, str(node.target)) if node.op == "get_attr" and owner is not None else None
    return value if isinstance(value, nn.Module) else None


def _nothing(glob: str, matched: list[str], known: list[str], model: PreparedGraph) -> str:
    as_it_is = [path for path, _ in model.named_modules() if fnmatchcase(path, glob) and path]
    if matched:
        return f"{matched[0]!r}, the match of {glob!r}, computes nothing in the captured graph; cut at another module"
    if as_it_is:
        return (f"{as_it_is[0]!r}, the match of {glob!r}, is a module that the graph uses as it is; cut at a module "
                "around it")
    return f"{glob!r} matches no module of the model; {nearest(glob, known)}"
