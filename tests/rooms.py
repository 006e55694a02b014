"""The tests of a room: ``python tests/rooms.py planning`` prints where pytest finds them."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def places_of(room: str, checkout: Path = ROOT) -> list[str]:
    """The folders and files with the tests of ``qtk/room``, doctests included; ``qtk`` are the files beside the rooms.

    Raises: ValueError if there is no such room.

    >>> places_of("planning")
    ['tests/planning', 'qtk/planning']
    >>> places_of("csrc")
    ['tests/kernels', 'tests/ops']
    """
    if room == "csrc":
        return ["tests/kernels", "tests/ops"]
    if room == "qtk":
        files = [*(checkout / "tests").glob("test_*.py"), *(checkout / "qtk").glob("*.py")]
        return sorted(str(path.relative_to(checkout)) for path in files)
    places = [place for place in (f"tests/{room}", f"qtk/{room}") if (checkout / place).is_dir()]
    if not places:
        raise ValueError(f"there is no room {room!r}: neither tests/{room} nor qtk/{room} is a folder")
    return places


if __name__ == "__main__":
    print(*places_of(sys.argv[1]))
