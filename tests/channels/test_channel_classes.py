"""Classes of variables, against a search through the graph of their pairs."""

from __future__ import annotations

import pytest
import torch

from qtk.channels.channel_classes import PINNED, ZERO, ChannelClasses, compact, constant_labels, core


@pytest.mark.parametrize("pairs", [0, 1, 30, 60, 200])
def test_representatives_are_the_smallest_of_what_is_connected(pairs: int) -> None:
    generator = torch.Generator().manual_seed(pairs)
    classes = ChannelClasses()
    labels = classes.new(100)
    joined = torch.randint(0, 100, (pairs, 2), generator=generator)
    for a, b in joined.tolist():
        classes.unify(labels[a], labels[b])
    neighbours: dict[int, set[int]] = {}
    for a, b in joined.tolist():
        neighbours.setdefault(a, set()).add(b)
        neighbours.setdefault(b, set()).add(a)
    for start in range(100):
        reached, pending = {start}, [start]
        while pending:
            new = neighbours.get(pending.pop(), set()) - reached
            reached |= new
            pending += new
        assert int(classes.representatives()[2 + start]) == 2 + min(reached)


def test_pairs_may_be_added_after_a_look() -> None:
    classes = ChannelClasses()
    a, b, c = classes.new(1), classes.new(1), classes.new(1)
    classes.unify(a, b)
    assert classes.representatives().tolist() == [0, 1, 2, 2, 4]
    classes.unify(b, c)
    assert classes.representatives().tolist() == [0, 1, 2, 2, 2]
    classes.pin(c)
    assert classes.representatives().tolist() == [0, 1, 1, 1, 1]


def test_zeros_are_equal_to_everything_and_join_nothing() -> None:
    classes = ChannelClasses()
    a, b = classes.new(3), classes.new(3)
    a[1], b[2] = ZERO, ZERO
    merged = classes.unify(a, b)
    assert merged.tolist() == [2.0, 6.0, 4.0]
    assert classes.representatives().tolist() == [0, 1, 2, 3, 4, 2, 6, 7]
    padded = torch.stack([torch.zeros(2), torch.tensor([2.0, 7.0])]).double()
    assert classes.unify_along(padded, [0]).tolist() == [[2.0, 7.0]]
    classes.pin(torch.zeros(3, dtype=torch.float64))
    assert int(classes.representatives()[ZERO]) == ZERO


def test_along_an_axis_all_become_one() -> None:
    classes = ChannelClasses()
    labels = classes.new(6).view(2, 3).expand(5, 2, 3)
    assert classes.unify_along(labels, [0, 2]).shape == (1, 2, 1)
    assert classes.representatives().tolist() == [0, 1, 2, 2, 2, 5, 5, 5]


def test_labels_are_stored_where_they_vary() -> None:
    classes = ChannelClasses()
    labels = classes.new(3).view(1, 3, 1).expand(4, 3, 5)
    materialized = compact(labels.contiguous())
    assert torch.equal(materialized, labels)
    assert core(materialized).shape == (1, 3, 1)
    assert core(constant_labels((2, 3))).shape == (1, 1)
    assert constant_labels((2,)).tolist() == [PINNED, PINNED]
