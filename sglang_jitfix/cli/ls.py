"""``sglang-jitfix ls``: every leaf of a cache and its state."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_jitfix.cli import caches, output

STAGING = "staging"


def add_parser(commands: Any) -> None:
    """Add this command to *commands*, argparse's sub-parsers."""
    parser = commands.add_parser(
        "ls",
        help="list the builds in a cache and tell the poisoned ones",
        description="Lists every leaf, newest first in its scope, and left-over staging folders."
        " Status ok: SGLang can use it. poisoned: good, but without the shim never found."
        " unreadable: the manifest is not what SGLang wrote. incomplete: a part is missing."
        " staging: a build in progress or its left-over. Imports neither SGLang nor torch.",
    )
    parser.add_argument("root", nargs="?", metavar="ROOT", help="default: SGLang's own")
    parser.add_argument("--json", action="store_true", help="print a list of JSON objects")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the rows; 0, or 2 if a folder could not be read. Raises CommandError: no root."""
    cache = caches.Cache(caches.find_root(arguments.root))
    found = list(output.counted(rows(cache), "leaves"))
    if arguments.json:
        dated = [{**one, "modified": output.moment(one["modified"])} for one in found]
        print(json.dumps(dated, indent=2))
    else:
        show(found)
    for problem in cache.problems:
        output.say(f"sglang-jitfix: {problem}")
    return 2 if cache.problems else 0


def rows(cache: caches.Cache) -> Iterator[dict[str, Any]]:
    """One object for each leaf and left-over of *cache*; ``modified`` is in nanoseconds."""
    for scope in cache.scopes():
        for path in cache.leaves(scope):
            leaf = caches.examine(path)
            yield row(path, leaf.status, len(leaf.entries))
        for path in cache.left_overs(scope):
            yield row(path, STAGING, 0)


def row(path: Path, status: str, dependencies: int) -> dict[str, Any]:
    """The object of the leaf or left-over at *path*."""
    return {
        **place(path),
        "status": status,
        "size_bytes": caches.size(path),
        "modified": caches.modified(path),
        "dependencies": dependencies,
    }


def place(path: Path) -> dict[str, str]:
    """The names that lead to the leaf at *path*."""
    return dict(zip(("target", "module", "build", "leaf"), path.parts[-4:], strict=True))


def show(found: list[dict[str, Any]]) -> None:
    """Print *found* for people."""
    if found:
        heads = ["target", "module", "build", "leaf", "status", ">size", "modified", ">deps"]
        print(output.table(heads, [cells(one) for one in found]))
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
    names = [one[name] for name in ("target", "module", "build", "leaf", "status")]
    return [*names, output.size(one["size_bytes"]), when, str(one["dependencies"])]
