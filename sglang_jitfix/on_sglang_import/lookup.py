"""Look-ups in SGLang's JIT build cache that find poisoned leaves (0.5.21, ``cache.py``).

A poisoned leaf is a good build whose manifest names its own generated unit in a
staging folder that is gone. ``find_prebuilt`` reads a leaf's manifest (``_read_deps``),
hashes what it lists (``_refresh``), and compares with the leaf's name. These wrappers
let SGLang do all of that, and answer only for such a unit, with the digest that is
recorded: see :func:`sglang_jitfix.leaves.is_own_unit` for why that is sound. SGLang does
the same in the process that built the module, whose ``_digest_cache`` remembers the unit.
That memo is not used here: it knows a path, not which leaf asks, so a digest put
there for one leaf would let a copy of it in another build's folder hit as well.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from sglang_jitfix import leaves


class _Entries(list[Any]):
    """A leaf's entries, which remember the name of the leaf's scope."""

    build = ""


class _Listing(pathlib.PosixPath):
    """A scope of which only the given leaves are listed."""

    leaves: Sequence[pathlib.Path] = ()

    def iterdir(self) -> Iterator[pathlib.Path]:  # type: ignore[override]
        return iter(self.leaves)


def read_deps(read: Callable[..., Any], instance: object, args: Any, kwargs: Any) -> Any:
    """Wrapper of ``_read_deps(leaf)``: the same entries or None, marked with the leaf's scope."""
    entries = read(*args, **kwargs)
    if entries is None:
        return None
    leaf = args[0] if args else kwargs["leaf"]
    marked = _Entries(entries)
    marked.build = leaf.parent.name
    return marked


class Refresh:
    """Wrapper of ``_refresh(entries)``: own units that are gone keep their recorded digest."""

    def __init__(self, cache: ModuleType) -> None:
        self.cache = cache

    def __call__(
        self, refresh: Callable[..., Any], instance: object, args: Any, kwargs: Any
    ) -> Any:
        current, changed = refresh(*args, **kwargs)
        entries = args[0] if args else kwargs["entries"]
        # Only a dependency that has vanished can be a poisoned leaf's unit, so a
        # good leaf costs nothing more.
        if current is not None or not isinstance(entries, _Entries):
            return current, changed
        own = vanished_units(self.cache, entries)
        if not own or len(own) == len(entries):  # SGLang publishes no leaf without dependencies
            return current, changed
        others = list(entries)
        for index in reversed(own):
            del others[index]
        current, changed = refresh(others)
        if current is not None:
            for index in own:
                current.insert(index, entries[index])
        return current, changed


class FindPrebuilt:
    """Wrapper of ``find_prebuilt(*, scope, module_name)``: poisoned leaves hide no other.

    SGLang looks at the newest hundred leaves. The fault adds one a process, most of them
    copies of a few builds, and whatever lies behind them is never found again. So where
    SGLang finds nothing in a scope of more leaves, this looks once more: poisoned ones do
    not count towards the limit, and of each content only the newest is looked at, because
    its copies would get the same verdict. SGLang's own function judges those that remain.
    """

    def __init__(self, cache: ModuleType) -> None:
        self.cache = cache

    def __call__(self, find: Callable[..., Any], instance: object, args: Any, kwargs: Any) -> Any:
        found = find(*args, **kwargs)
        limit = getattr(self.cache, "_MAX_LEAVES_SCANNED", None)
        if found is not None or limit is None:
            return found
        wanted = unhidden(self.cache, limit, **kwargs)
        for start in range(0, len(wanted), limit):
            listing = _Listing(kwargs["scope"])
            listing.leaves = wanted[start : start + limit]
            found = find(scope=listing, module_name=kwargs["module_name"])
            if found is not None:
                return found
        return None


def unhidden(
    cache: ModuleType, limit: int, *, scope: pathlib.Path, module_name: str
) -> list[pathlib.Path]:
    """The leaves of *scope* to look at, newest first, where poisoned ones may hide others.

    *limit* is how many SGLang has looked at. Empty if that was all there is to see.
    """
    try:
        newest_first = sorted(
            (leaf for leaf in scope.iterdir() if leaf.name.startswith(leaves.LEAF_PREFIX)),
            key=lambda leaf: leaf.stat().st_mtime,
            reverse=True,
        )
    except OSError:
        return []
    if len(newest_first) <= limit:
        return []
    wanted = []
    contents: set[str] = set()
    good = 0
    for leaf in newest_first:
        entries = cache._read_deps(leaf)
        own = vanished_units(cache, entries or _Entries())
        if own:
            content = cache._deps_key([e for i, e in enumerate(entries) if i not in own])
            if content in contents:
                continue
            # A copy gets this one's verdict only if this one is complete and its
            # list, which content was taken from, is the one it is named after.
            proven = leaf.name == leaves.LEAF_PREFIX + cache._deps_key(entries)
            if proven and (leaf / f"{module_name}.so").is_file():
                contents.add(content)
        elif good == limit:
            break
        else:
            good += 1
        wanted.append(leaf)
    return wanted if len(wanted) > good else []


def vanished_units(cache: ModuleType, entries: Any) -> list[int]:
    """Which of a leaf's *entries* are its own build's generated units, and gone: their indices."""
    return [
        index
        for index, entry in enumerate(entries)
        if ".staging-" in entry.relpath  # few are, and the rest takes a call
        and leaves.is_own_unit(entry, entries.build)
        and _is_gone(cache, entry)
    ]


def _is_gone(cache: ModuleType, entry: leaves.Dependency) -> bool:
    path: os.PathLike[str] | None = cache._resolve_path(root=entry.root, relpath=entry.relpath)
    return path is not None and leaves.is_gone(path)
