"""``sglang-jitfix explain``: would a leaf hit now, and what keeps it from it.

SGLang tells this for the first leaf it rejects and of that the first dependency, at
debug level. Here it is told for all of them, by SGLang's own functions and with the
shim as it is in this environment.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from sglang_jitfix import leaves
from sglang_jitfix.cli import caches, ls, output
from sglang_jitfix.cli.errors import CommandError
from sglang_jitfix.on_sglang_import import lookup

PREFIX = "sgl_kernel_jit_"  # of every module's name, spec.py


def add_parser(commands: Any) -> None:
    """Add this command to *commands*, argparse's sub-parsers."""
    parser = commands.add_parser(
        "explain",
        help="tell for each build of a module whether SGLang would use it now, and why not",
        description="Tells for each leaf whether SGLang would use it now, and if not, which"
        " dependencies changed or vanished. Imports SGLang, which takes a while.",
    )
    parser.add_argument(
        "module", nargs="?", metavar="MODULE", help=f"with or without {PREFIX}; default: all"
    )
    parser.add_argument("--root", metavar="ROOT", help="default: SGLang's own")
    parser.add_argument("--json", action="store_true", help="print a list of JSON objects")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the verdicts; 0, or 2 if a folder could not be read.

    Raises CommandError: no such root or module, no SGLang.
    """
    cache = caches.Cache(caches.find_root(arguments.root))
    wanted = {arguments.module, PREFIX + (arguments.module or "")}
    scopes = [
        scope for scope in cache.scopes() if arguments.module is None or scope.parent.name in wanted
    ]
    if arguments.module is not None and not scopes:
        raise CommandError(f"no build of {arguments.module!a} in {str(cache.root)!a}")
    sglang = load_sglang()
    found = list(output.counted(verdicts(cache, scopes, sglang), "leaves"))
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)
    for problem in cache.problems:
        output.say(f"sglang-jitfix: {problem}")
    return 2 if cache.problems else 0


def load_sglang() -> ModuleType:
    """SGLang's cache module; raises CommandError if it cannot be imported."""
    if find_spec("sglang") is None:
        raise CommandError(f"no SGLang in {sys.prefix}: install sglang-jitfix beside it")
    output.say("importing SGLang")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result
            return import_module("sglang.kernels.jit.utils.compile.cache")
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CommandError(f"SGLang's JIT cache cannot be imported: {reason}") from error


def verdicts(
    cache: caches.Cache, scopes: list[Path], sglang: ModuleType
) -> Iterator[dict[str, Any]]:
    """One object for each leaf of *scopes*, as ``explain --json`` prints them."""
    limit = getattr(sglang, "_MAX_LEAVES_SCANNED", sys.maxsize)
    for scope in scopes:
        ahead = 0  # newer leaves that count towards the limit
        for path in cache.leaves(scope):
            found, own = verdict(path, sglang)
            if not own:
                if found["hit"] and ahead >= limit:
                    found["hit"] = False
                    found["reason"] = f"SGLang looks at {limit} leaves, and {ahead} are newer"
                ahead += 1
            yield {**ls.place(path), **found}


def verdict(path: Path, sglang: ModuleType) -> tuple[dict[str, Any], list[int]]:
    """Whether SGLang would take the leaf at *path* now, and what speaks against it.

    The second value are the indices of its own units that are gone, if the shim is on.
    """
    leaf = caches.examine(path)
    entries = sglang._read_deps(path) or []
    own = lookup.vanished_units(sglang, entries) if hasattr(entries, "build") else []
    current = sglang._refresh(entries)[0] if entries else None
    hit = (
        current is not None
        and path.name == leaves.LEAF_PREFIX + sglang._deps_key(current)
        and leaf.status != caches.INCOMPLETE
    )
    changed, vanished = [], []
    for index, entry in enumerate(entries):
        where = sglang._resolve_path(root=entry.root, relpath=entry.relpath)
        digest = None if where is None else sglang._file_digest(where)
        name = f"{entry.root}:{entry.relpath}" if where is None else str(where)
        if digest is None and index not in own:
            vanished.append(name)
        elif digest is not None and digest != entry.digest:
            changed.append(name)
    found = {
        "status": leaf.status,
        "hit": hit,
        "reason": leaf.reason or None,
        "changed": changed,
        "vanished": vanished,
    }
    return found, own


def show(found: list[dict[str, Any]]) -> None:
    """Print *found* for people: a line for each leaf, and one below it for each reason."""
    for one in found:
        names = "/".join(output.printable(one[name]) for name in ("target", "module", "build"))
        print(f"{'hit' if one['hit'] else 'miss':5}{names}/{output.printable(one['leaf'])}")
        if one["reason"]:
            print(f"     {one['status']}: {one['reason']}")
        for kind in ("changed", "vanished"):
            for path in one[kind]:
                print(f"     {kind}: {output.printable(path)}")
    hits = sum(one["hit"] for one in found)
    print(f"{output.plural(len(found), 'leaf', 'leaves')}, {hits} SGLang would use now")
