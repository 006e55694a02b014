"""Sets that have members in common."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import TypeVar

Member = TypeVar("Member", bound=Hashable)


def joined(groups: Iterable[Iterable[Member]]) -> list[list[Member]]:
    """Joins groups that have a member in common, directly or through others; members in their first order.

    >>> joined(["ab", "cd", "e", "bd"])
    [['a', 'b', 'c', 'd'], ['e']]
    """
    found: dict[Member, dict[Member, None]] = {}
    for group in groups:
        members = list(group)
        whole: dict[Member, None] = {}
        for other in {id(found[each]): found[each] for each in members if each in found}.values():
            whole |= other
        whole |= dict.fromkeys(members)
        found |= dict.fromkeys(whole, whole)
    return [list(whole) for whole in {id(each): each for each in found.values()}.values()]
