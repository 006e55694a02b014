"""Rule 20 of the planner: quantizes the keys and values of attention as a cache holds them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from torch import fx

from qtk.config.schema import KvCache
from qtk.config.tensor_setting import TensorSetting
from qtk.core.overlaps import joined
from qtk.core.plan import SitePlan
from qtk.core.site import Site
from qtk.errors import ConfigError
from qtk.graph.attention import Operand, attentions
from qtk.graph.flow import Flow, is_result, reads_shape_only
from qtk.graph.sites import OWNER, Port, edge_site, exclusion, label, value_site
from qtk.graph.written_buffers import is_input
from qtk.operators.op_row import Role
from qtk.planning.decision import Decision
from qtk.planning.draft import Draft, is_empty

KEY = "kv_cache"
"""Of the config."""

REPEATED = "expand"
"""Kind of the ops that repeat keys and values for each head of a group of queries."""


@dataclass(frozen=True, slots=True)
class _Moved:
    """A value on the way from where it is computed to where it is read, and its axes of tokens and of one head's width.

    The axes are ``None`` where a reshape mixed them.
    """

    node: fx.Node
    tokens: int | None
    width: int | None

    @property
    def heads(self) -> int | None:
        """The axis of heads, behind the batch axis; ``None`` if there is none, or the axes are not known."""
        shape = self.node.meta["val"].shape
        others = [axis for axis in range(len(shape)) if axis not in (self.tokens, self.width)][1:]
        if self.tokens is None or self.width is None or not others:
            return None
        longer = [axis for axis in others if shape[axis] != 1]
        return longer[0] if len(longer) == 1 else others[-1]

    @property
    def is_canonical(self) -> bool:
        """Says whether the value is [..., heads, tokens, width]."""
        rank = self.node.meta["val"].ndim
        return (self.heads, self.tokens, self.width) == (rank - 3, rank - 2, rank - 1)


def plan_caches(draft: Draft) -> None:
    """Quantizes the keys and values of every attention, entries of a cache in the graph included.

    Requires: values are decided; merges are not.
    Ensures: each is in ``values`` where it has heads and is not repeated yet, if attention and caches alone read it
    there, else in ``edges``; ``caches`` has its sites. What it was computed as and only moved is in ``floats``. A
    dynamic range is taken of new keys and values alone; entries of a cache were rounded with their own range.
    """
    setting = draft.rules.config.kv_cache
    if setting is None or draft.io is None:
        return
    reads = [(name, operand) for each in attentions(draft.graph, draft.flow)
             for name, operand in (("keys", each.keys), ("values", each.values))]
    parts = [list(_parts(draft.flow, operand)) for _, operand in reads]
    ports = {(port.user, port.index) for part in parts for port, _ in part}
    counts = Counter[Site]()
    for (name, operand), part in zip(reads, parts, strict=True):
        cache = Site(label(operand.port.user, OWNER) or "", "", name)
        counts[cache] += 1  # of several attentions in a module
        sites = [_plan(draft, setting, port, way, ports) for port, way in part]
        draft.caches.append([replace(cache, op=str(counts[cache])), *(site for site in sites if site is not None)])


def share_caches(drafts: Sequence[Draft], sites: Mapping[Site, SitePlan]) -> dict[Site, SitePlan]:
    """Gives the keys, and the values, of each attention one encoding in all graphs of a model.

    Raises: ConfigError if no graph has attention.
    """
    caches = [cache for draft in drafts for cache in draft.caches]
    if not caches:
        raise ConfigError(f"{KEY} of the config quantizes keys and values of attention, and the graphs of this model "
                          "have none (a softmax between two products); take the key out. print(qtk.prepare_model("
                          "model, example_inputs).report) says what is in no graph")
    leaders: dict[Site, Site] = {}
    for cache in joined(caches):
        known = [site for site in cache if site in sites and not sites[site].spec.dynamic]
        leaders |= {site: known[0] for site in known[1:] if sites[site].spec == sites[known[0]].spec}
    followed = {site: leaders.get(site) or leaders.get(decided.leader or site) for site, decided in sites.items()}
    return {site: decided if (leader := followed[site]) is None else replace(decided, leader=leader, static=False)
            for site, decided in sites.items()}


def _parts(flow: Flow, operand: Operand) -> Iterator[tuple[Port, list[_Moved]]]:
    """Where keys or values are read, by attention and by the merges with a cache, and their way there."""
    rank = operand.port.value.meta["val"].ndim
    pending = [(operand.port, operand.tokens + rank, operand.width + rank)]
    while pending:
        port, *axes = pending.pop()
        way = _way(flow, port.value, *axes)
        yield port, way
        root = way[0]
        if holds_a_cache(flow, root.node):
            pending += [(read, root.tokens, root.width) for read in reversed(flow.data_ports(root.node))
                        if not is_empty(read.value)]


def _way(flow: Flow, value: fx.Node, tokens: int | None, width: int | None) -> list[_Moved]:
    """Returns what a value was on its way, first what computes it."""
    way = [_Moved(value, tokens, width)]
    while (source := flow.carried(way[0].node)) is not None:
        moved = way[0]
        axes = [_axis_before(flow, moved.node, source, axis) for axis in (moved.tokens, moved.width)]
        way.insert(0, _Moved(source, *axes))
    return way


def _axis_before(flow: Flow, moved: fx.Node, source: fx.Node, axis: int | None) -> int | None:
    row = flow.row(moved)
    if axis is None or row is None:
        return None
    if row.role is Role.MERGE:  # with what is empty
        return axis
    return None if row.input_axis is None else row.input_axis(moved, source, axis)


def holds_a_cache(flow: Flow, node: fx.Node) -> bool:
    """Says whether an op merges what a model takes with new keys or values."""
    row = flow.row(node)
    return row is not None and row.role is Role.MERGE and any(
        is_input(flow.root(port.value)) for port in flow.data_ports(node))


def _plan(
    draft: Draft, setting: KvCache, port: Port, way: list[_Moved], ports: Set[tuple[fx.Node, int]]
) -> Site | None:
    """Quantizes keys or values on their way to ``port``.

    Returns: the site; ``None`` if they have been rounded, or are parameters.
    """
    root = way[0].node
    if draft.flow.is_static(root):
        return None
    is_merge = holds_a_cache(draft.flow, root)
    if setting.granularity == "per_token" and (is_merge or (is_input(root) and holds_a_cache(draft.flow, port.user))):
        if draft.values.pop(root, None) is not None:
            draft.floats[root] = "its keys or values have been rounded, each with a range of its own"
        return None
    if is_merge:
        draft.cached.add(root)
    place = _place(draft, way, ports)
    moved = place or way[-1]
    decision = Decision(_setting(setting, moved), True, KEY)
    if _lacks_axes(draft.flow, setting, decision.setting, way[0], moved):
        draft.misfits.append(
            f"{value_site(moved.node)}: keys or values {list(moved.node.meta['val'].shape)}, of which the axes of "
            f"heads, tokens and width are not told apart; write {KEY}: {{dtype: {setting.dtype}, granularity: "
            "per_tensor}")
    plan = replace(draft.site_plan(draft.activation_spec(moved.node, decision), decision, "keys or values"),
                   is_cache=True)
    if place is None:
        draft.edges[edge_site(port)] = plan
        return edge_site(port)
    if place.node is not root and _is_read_as_cache(draft, root, ports) and draft.values.pop(root, None) is not None:
        draft.floats[root] = f"rounded as keys or values, at {value_site(place.node)}"
    draft.floats.pop(place.node, None)
    draft.values[place.node] = plan
    return value_site(place.node)


def _setting(setting: KvCache, moved: _Moved) -> TensorSetting:
    """Translates the setting of a cache into the setting of an activation."""
    given = TensorSetting(dtype=setting.dtype, symmetric=True, granularity="per_tensor")
    if setting.granularity == "per_token":  # max|x| / 127, as the kernels of servers compute it
        return given.overlaid(TensorSetting(granularity="per_token", narrow_range=setting.dtype == "int8" or None))
    if setting.granularity == "per_head" and moved.heads is not None:
        return given.overlaid(TensorSetting(granularity="per_channel", axis=moved.heads))
    return given


def _lacks_axes(flow: Flow, setting: KvCache, decided: TensorSetting, root: _Moved, moved: _Moved) -> bool:
    """Says whether there is no axis that scales are asked for."""
    rank = moved.node.meta["val"].ndim
    return (decided.granularity == "per_token" and moved.width != rank - 1) or (
        setting.granularity == "per_head" and decided.axis is None and not _has_one_head(flow, root))


def _has_one_head(flow: Flow, root: _Moved) -> bool:
    """Says whether keys or values are computed as [batch, tokens, width], not of what had an axis more, as of heads."""
    node: fx.Node | None = root.node
    if root.node.meta["val"].ndim != 3 or None in (root.tokens, root.width):
        return False
    while node is not None and node.meta["val"].ndim == 3:
        row, source = flow.row(node), flow.carried(node)
        if source is None and row is not None and not row.multiplies:
            source = next((port.value for port in flow.data_ports(node)
                           if port.value.meta["val"].shape == node.meta["val"].shape), None)
        node = source
    return node is None or node.meta["val"].ndim < 3


def _place(draft: Draft, way: Sequence[_Moved], ports: Set[tuple[fx.Node, int]]) -> _Moved | None:
    """Where a quantizer stands on the way, before keys or values are repeated; ``None``: only where they are read.

    That is the first place where they are [batch, heads, tokens, width], else where they have heads, else where the
    width of a head is an axis, else at all.
    """
    own: list[_Moved] = []
    for moved in way:
        row = draft.flow.row(moved.node)
        if own and row is not None and row.kind == REPEATED:
            break
        if exclusion(moved.node) is None and _is_read_as_cache(draft, moved.node, ports):
            own.append(moved)
    preferred = (each for fits in (
        lambda each: each.is_canonical, lambda each: each.heads is not None, lambda each: each.width is not None)
                 for each in own if fits(each))
    return next(preferred, own[0] if own else None)


def _is_read_as_cache(draft: Draft, node: fx.Node, ports: Set[tuple[fx.Node, int]]) -> bool:
    """Says whether attention, as keys or values, and caches are all that reads a value."""
    return all((port.user, port.index) in ports or is_result(port) or reads_shape_only(port.user)
               for port in draft.flow.readers(node))
