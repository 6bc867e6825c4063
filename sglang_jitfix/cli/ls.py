"""``sglang-jitfix ls``: every leaf of a cache and its state.

``--json`` prints a list of objects, one for each leaf and left-over: ``target``,
``module``, ``build`` and ``leaf`` (the names that lead to it), ``status``, ``size_bytes``,
``modified`` (UTC, ISO 8601), ``dependencies`` (how many its manifest lists).
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_jitfix.cache import disk
from sglang_jitfix.cli import output

STAGING = "staging"
HEADS = ["target", "module", "build", "leaf", "status", ">size", "modified", ">deps"]


def run(arguments: argparse.Namespace) -> int:
    """Print the rows; 0, or 2 if a folder could not be read. Raises CommandError: no root."""
    cache = disk.Cache(disk.find_root(arguments.root))
    found = list(output.counted(rows(cache), "leaves"))
    if arguments.json:
        output.show_json([{**one, "modified": output.moment(one["modified"])} for one in found])
    else:
        show(found)
    return output.finish(cache.problems, 0)


def rows(cache: disk.Cache) -> Iterator[dict[str, Any]]:
    """One object for each leaf and left-over of *cache*; ``modified`` is in nanoseconds."""
    for scope in cache.scopes():
        for path in cache.leaves(scope):
            leaf = disk.examine(path)
            yield row(path, leaf.status, len(leaf.entries))
        for path in cache.left_overs(scope):
            yield row(path, STAGING, 0)


def row(path: Path, status: str, dependencies: int) -> dict[str, Any]:
    """The object of the leaf or left-over at *path*."""
    return {
        **disk.place(path),
        "status": status,
        "size_bytes": disk.size(path),
        "modified": disk.modified(path),
        "dependencies": dependencies,
    }


def show(found: list[dict[str, Any]]) -> None:
    """Print *found* for people."""
    if found:
        print(output.table(HEADS, [cells(one) for one in found]))
    counts = Counter(one["status"] for one in found)
    total = sum(one["size_bytes"] for one in found)
    leaves = output.plural(len(found) - counts[STAGING], "leaf", "leaves")
    kinds = ", ".join(f"{counts[status]} {status}" for status in sorted(counts))
    print(f"{leaves}, {output.size(total)}{kinds and ': '}{kinds}")


def cells(one: dict[str, Any]) -> list[str]:
    """The cells of one row."""
    when = output.moment(one["modified"])
    if one["status"] == STAGING:
        when = output.age(time.time() - one["modified"] / 1e9) + " old"
    names = [one[name] for name in HEADS[:5]]
    return [*names, output.size(one["size_bytes"]), when, str(one["dependencies"])]
