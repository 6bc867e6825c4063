"""``sglang-jitfix explain``: would a launch here use what is in the cache, and why not.

``--json`` prints a list of objects, one for each leaf:

- ``target``, ``module``, ``build``, ``leaf``: the names that lead to it;
- ``status``: what `ls` calls it;
- ``verdict``: ``hit``, a launch in this environment would use it; ``miss``, it would not;
  ``unknown``, that cannot be told. ``hit``: whether it is ``hit``;
- ``reason``: why it is not a hit, where nothing below says so, or null;
- ``differs``: what makes SGLang look for another build than this one, as objects of
  ``what`` (``nvcc``, ``cxx``, ``flag``, ``include path``, ``library path``, ``architecture``,
  ``versions``, ``unit``, ``build rule``, ``order of flags``), ``built`` and ``here``, which are
  null where there is nothing or it is not recorded;
- ``changed``, ``vanished``: dependencies that are not as they were, or not there;
- ``advice``: settings of this environment with which it would be used, in words, or null.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterable
from typing import Any

from sglang_jitfix.cache import disk, launch
from sglang_jitfix.cache.errors import CommandError
from sglang_jitfix.cli import output


def run(arguments: argparse.Namespace) -> int:
    """Print the verdicts; 0, or 2 if a folder could not be read; with ``--check`` see main.py.

    Raises CommandError: no such root or module, no SGLang; with ``--check``, no build at all.
    """
    cache = disk.Cache(disk.find_root(arguments.root))
    wanted = {arguments.module, launch.PREFIX + (arguments.module or "")}
    scopes = [
        scope for scope in cache.scopes() if arguments.module is None or scope.parent.name in wanted
    ]
    if arguments.module is not None and not scopes:
        raise CommandError(f"no build of {arguments.module!a} in {str(cache.root)!a}")
    output.say("importing SGLang")
    has_gpu = launch.load_sglang()
    progress = functools.partial(output.counted, noun="scopes")
    found = list(launch.verdicts(cache, scopes, progress))
    if arguments.json:
        output.show_json(found)
    else:
        show(found)
    status = check(found, has_gpu) if arguments.check else 0
    return output.finish(cache.problems, status)


def check(found: Iterable[dict[str, Any]], has_gpu: bool) -> int:
    """0 if each module in *found* has a hit, else tell which have not: 1, or 2 if one may.

    A module for several architectures needs one for each; where there is a GPU, for that.
    """
    modules: dict[str, set[str]] = {}
    for one in found:
        name = one["module"] if has_gpu else f"{one['target']}/{one['module']}"
        modules.setdefault(name, set()).add(one["verdict"])
    if not modules:
        raise CommandError("there is no build to check")
    status = 0
    for name, verdicts in modules.items():
        if launch.HIT not in verdicts:
            missing = launch.UNKNOWN not in verdicts
            words = "no build that a launch here would use" if missing else "it cannot be told"
            output.say(f"sglang-jitfix: {name}: {words}")
            status = 1 if missing or status == 1 else 2
    return status


def show(found: list[dict[str, Any]]) -> None:
    """Print *found* for people: a line for each leaf, and one below it for each reason."""
    for one in found:
        place = (output.printable(one[name]) for name in ("target", "module", "build", "leaf"))
        print(f"{one['verdict']:4} {'/'.join(place)}")
        if one["reason"]:
            print(f"     {one['status']}: {output.printable(one['reason'])}")
        for item in one["differs"]:
            print(f"     {output.printable(in_words(**item))}")
        for kind in ("changed", "vanished"):
            for path in one[kind]:
                print(f"     {kind}: {output.printable(path)}")
        if one["advice"]:
            print(f"     {output.printable(one['advice'])}")
    hits = sum(one["hit"] for one in found)
    print(f"{output.plural(len(found), 'leaf', 'leaves')}, {hits} SGLang would use now")


def in_words(what: str, built: str | None, here: str | None) -> str:
    """One of ``differs`` for people."""
    if what == "versions":
        return (
            "versions: all that is recorded agrees, so the version of a compiler or of a package"
            f" that SGLang counts differs; here {here}"
        )
    return f"{what}: built {built or 'without'}, here {here or 'without'}"
