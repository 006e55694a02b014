"""Sets that have members in common."""

import random

from qtk.core.overlaps import joined


def test_groups_are_the_connected_components():
    draw = random.Random(0)
    for _ in range(50):
        groups = [draw.sample(range(20), draw.randint(1, 3)) for _ in range(draw.randint(0, 12))]
        names = {member: member for group in groups for member in group}
        for _ in names:  # labels spread until nothing changes
            for group in groups:
                names |= dict.fromkeys(group, min(names[member] for member in group))
        expected = {frozenset(member for member in names if names[member] == label) for label in names.values()}
        found = joined(groups)
        assert {frozenset(group) for group in found} == expected
        assert sum(map(len, found)) == len(names)
