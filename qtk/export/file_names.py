"""File names for module paths: one component, plain ASCII, short enough for every file system."""

from __future__ import annotations

import hashlib
from urllib.parse import quote

LONGEST = 200
"""Characters of a stem; file systems allow 255 bytes, and ``.onnx.data`` and the like come behind it."""


def file_stem(path: str) -> str:
    """The stem of the file of a module path; different paths have different stems.

    >>> file_stem("backbone.body")
    'backbone.body'

    Other characters than letters, digits and ``_.-~@`` are percent-encoded:

    >>> file_stem("/x/evil"), file_stem("..")
    ('%2Fx%2Fevil', '%2E.')

    A long path ends in its hash:

    >>> file_stem("a" * 300)[-22:]
    'aaaaa+8b397aa4c75429a2'
    """
    stem = quote(path, safe="@", errors="surrogatepass")
    if stem.startswith("."):  # a hidden file, or the directory itself
        stem = f"%2E{stem[1:]}"
    if len(stem) <= LONGEST:
        return stem
    digest = hashlib.blake2b(path.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return f"{stem[:LONGEST - 1 - len(digest)]}+{digest}"  # a + of the path itself would be %2B
