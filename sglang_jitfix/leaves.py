"""SGLang's JIT cache as it lies on disk, known without SGLang (``cache.py``, 0.5.18 to 0.5.23).

::

    <root>/<target>/<module>/build-<build key>/      a scope, with SGLang's lock, .lock
        deps-<deps key>/sgl_deps.json, <module>.so   a leaf, named after its manifest
        .staging-<uuid>/                             a build in progress, or left over

The hook of SGLang's look-ups and the command line share what is here.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple, Protocol

MANIFEST = "sgl_deps.json"
LOCK = ".lock"
LEAF_PREFIX = "deps-"
BUILD = re.compile(r"build-[0-9a-f]{16}")
STAGING = re.compile(r"\.staging-[0-9a-f]{32}")
UNITS = ("main.cpp", "cuda.cu")  # BuildSpec.translation_units, spec.py


class Dependency(Protocol):
    """An entry of a manifest: ours, or SGLang's ``_DepEntry``."""

    @property
    def root(self) -> str: ...
    @property
    def relpath(self) -> str: ...
    @property
    def digest(self) -> str: ...


class Entry(NamedTuple):
    """One dependency: ``"abs"`` or one of SGLang's anchors, the path below it, its SHA-256."""

    root: str
    relpath: str
    digest: str


def is_own_unit(entry: Dependency, build: str) -> bool:
    """Whether *entry* names a unit that SGLang generated for the scope called *build*.

    Such an entry may be left out of the manifest once its file is gone, and the leaf
    is still no staler than SGLang's own: the unit's text is hashed into the build key
    (``compute_build_key``), and the build key is the scope's name. Whoever looks into
    this scope would generate that very text, and the files it includes have entries
    of their own. SGLang leaves the unit out itself where it recognises its staging
    folder (``_to_entries``), for this reason. So the scope's name must be in the
    path: a leaf that was copied from another scope vouches for nothing here.
    """
    parts = entry.relpath.rsplit("/", 3)
    return (
        len(parts) == 4
        and parts[3] in UNITS
        and parts[1] == build
        and STAGING.fullmatch(parts[2]) is not None
        and BUILD.fullmatch(build) is not None
        and (entry.root != "abs" or entry.relpath.startswith("/"))
    )


def is_gone(path: str | os.PathLike[str]) -> bool:
    """Whether nothing is at *path*; False where the system does not tell, e.g. without access."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except (OSError, ValueError):  # ValueError: a null character
        return False
    return False


def deps_key(entries: Iterable[Dependency]) -> str:
    """The key that names the leaf of *entries*: ``_deps_key``, of their order as well."""
    text = "".join([f"{(entry.root, entry.relpath, entry.digest)!r}\0" for entry in entries])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def decode(manifest: bytes) -> list[Entry]:
    """The entries of *manifest*, the bytes of a ``sgl_deps.json``.

    Raises ValueError, of one line, for anything but what SGLang writes.
    """
    try:
        rows = json.loads(manifest.decode())
    except (ValueError, RecursionError):
        raise ValueError("the manifest is not JSON") from None
    # Sets of what there is: thousands of manifests of hundreds of rows have to be read.
    if (
        not isinstance(rows, list)
        or not {*map(type, rows)} <= {list}
        or not {*map(len, rows)} <= {3}
        or not {*map(type, chain.from_iterable(rows))} <= {str}
    ):
        raise ValueError("the manifest is not a list of [root, path, digest]")
    return [*map(Entry._make, rows)]


def encode(entries: Iterable[Entry]) -> bytes:
    """The manifest of *entries*, byte for byte what ``msgspec.json.encode`` makes of them."""
    return json.dumps(list(entries), ensure_ascii=False, separators=(",", ":")).encode()
