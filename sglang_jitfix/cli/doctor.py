"""``sglang-jitfix doctor``: what the shim does and sees here, without importing SGLang."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import sglang_jitfix
from sglang_jitfix import releases
from sglang_jitfix.cache import disk
from sglang_jitfix.cli import output, plan

MAX_LINKS = 40  # as many as Linux follows in one path, path_resolution(7)


def run(arguments: argparse.Namespace) -> int:
    """Print the report; always 0."""
    report = examine(arguments.root)
    if arguments.json:
        output.show_json(report)
    else:
        show(report)
    return 0


def examine(root: str | None = None) -> dict[str, Any]:
    """The report, as the JSON object that ``doctor --json`` prints.

    About the cache at *root*, or else the one that SGLang would use.
    """
    started = bool(sglang_jitfix.found_at_start)
    disabled = sglang_jitfix.is_set(sglang_jitfix.DISABLE)
    if disabled:
        why = f"{sglang_jitfix.DISABLE} is set"
    elif not started:
        why = "the start-up file did not run in this interpreter"
    else:
        why = "the start-up file ran in this interpreter"
    release = releases.installed()
    variable, given = disk.root_setting(sglang_jitfix.found_at_start or os.environ)
    if root is not None:
        variable, given = "ROOT", root
    known = release in releases.AFFECTED
    spelled = given or (releases.DEFAULT_ROOT if known else None)
    resolved = sglang_jitfix.real_root(spelled) if spelled else None
    report = {
        "shim_version": version(),
        "on": started and not disabled,
        "why": why,
        "startup_file": startup_file(),
        "startup_ran": started,
        "python": sys.executable,
        "sglang_version": release,
        "sglang_known_affected": known,
        "root_variable": variable,
        "root_given": given,
        "root_default": releases.DEFAULT_ROOT if known and not given else None,
        "root_resolved": resolved,
        "links": [{"link": link, "target": target} for link, target in links(spelled or "")],
        **waste(resolved),
    }
    return {**report, "hints": hints(report)}


def waste(root: str | None) -> dict[str, int | None]:
    """How many leaves below *root* are poisoned, and what their copies cost; None: no root.

    A copy is a poisoned leaf of a build that another leaf holds as well.
    """
    names = ("poisoned_leaves", "wasted_compiles", "wasted_bytes")
    if root is None or not os.path.isdir(root):
        return dict.fromkeys(names)
    cache = disk.Cache(Path(root))
    poisoned, copies = 0, []
    for scope in cache.scopes():
        found = [disk.examine(path) for path in cache.leaves(scope)]
        poisoned += sum(leaf.status == disk.POISONED for leaf in found)
        copies += [step.path for step in plan.steps(found) if step.action == plan.MERGED]
    wasted = sum(map(disk.size, copies))
    return dict(zip(names, (poisoned, len(copies), wasted), strict=True))


def startup_file() -> str | None:
    """Where ``sglang_jitfix.pth`` is installed, or None if it is not."""
    try:
        files = metadata.files("sglang-jitfix") or ()
    except metadata.PackageNotFoundError:  # a copy that is only on PYTHONPATH
        return None
    for file in files:
        path = str(file.locate())
        if file.name == "sglang_jitfix.pth" and os.path.isfile(path):
            return os.path.abspath(path)
    return None


def version() -> str:
    """The shim's version, or "not installed" for a copy without metadata."""
    try:
        return metadata.version("sglang-jitfix")
    except metadata.PackageNotFoundError:
        return "not installed"


def links(spelled: str) -> list[tuple[str, str]]:
    """Each symbolic link that is followed from *spelled* on, with what it points to."""
    found: list[tuple[str, str]] = []
    try:
        ahead = os.path.join(os.getcwd(), os.path.expanduser(spelled)).split("/")
    except OSError:  # a deleted working directory
        return found
    here = "/"
    while ahead and spelled:
        part = ahead.pop(0)
        if part == "..":
            here = os.path.dirname(here)
        elif part not in ("", "."):
            step = os.path.join(here, part)
            if os.path.islink(step) and len(found) < MAX_LINKS:
                target = os.readlink(step)
                found.append((step, target))
                ahead[:0] = target.split("/")
                here = "/" if target.startswith("/") else here
            else:
                here = step
    return found


def hints(report: dict[str, Any]) -> list[str]:
    """What the user may want to change, one sentence each."""
    found = []
    variable, given, resolved = (
        report["root_variable"],
        report["root_given"],
        report["root_resolved"],
    )
    if report["startup_file"] is None:
        found.append(
            "sglang_jitfix.pth is not installed: `pip install` the package into the environment"
            " itself, not with --target."
        )
    elif not report["startup_ran"]:
        found.append(
            "The start-up file did not run: Python reads it neither with -S nor in a folder that"
            " is only on PYTHONPATH."
        )
    ahead = sys.meta_path[: sys.meta_path.index(PathFinder)] if PathFinder in sys.meta_path else []
    if report["on"] and not any(isinstance(one, sglang_jitfix.Finder) for one in ahead):
        found.append(
            "Something, a sitecustomize perhaps, has put the shim's finder behind Python's own:"
            " SGLang's modules are not patched."
        )
    if report["sglang_version"] is None:
        found.append("No SGLang found in this environment.")
    elif not report["sglang_known_affected"]:
        found.append(
            f"SGLang {report['sglang_version']} is not a release known to have the fault:"
            " `sglang-jitfix verify` tells whether it has."
        )
    if variable == sglang_jitfix.LEGACY_ROOT:
        found.append(f"{variable} is the old name and wins over {sglang_jitfix.ROOT}: unset it.")
    if given and "$" in given:
        found.append(f"{variable} contains a literal $: a variable that the shell did not expand?")
    if given and given != given.strip():
        found.append(f"{variable} begins or ends with white space, which is part of the path.")
    if given and resolved is None:
        found.append(
            f"SGLang cannot use {given!a}: an unknown user, a loop of links, or no access."
        )
    if resolved is not None:
        existing = resolved
        while not os.path.lexists(existing):
            existing = os.path.dirname(existing)
        if not os.path.isdir(existing):
            found.append(f"{existing!a} is not a directory.")
        elif not os.access(existing, os.W_OK | os.X_OK):
            found.append(f"{existing!a} is not writable: builds are used but none can be added.")
    faulty = report["sglang_known_affected"] and not report["on"] and resolved is not None
    # Without us SGLang takes the path as pathlib expands it.
    if faulty and Path(given or report["root_default"]).expanduser() != Path(resolved):
        found.append(
            "The shim is off and this root is not canonical: what SGLang builds here it never"
            " finds again."
        )
    if report["poisoned_leaves"]:
        found.append(
            "Poisoned leaves are good builds that SGLang finds only with the shim on. To mend them"
            " for good, type `sglang-jitfix repair`; add --dry-run to see first what it would do."
        )
    variable = "CUDA_HOME" if os.environ.get("CUDA_HOME") else "CUDA_PATH"
    toolkit = os.environ.get(variable)
    if toolkit and toolkit != os.path.realpath(toolkit):
        found.append(
            f"{variable} is {toolkit!a}, which is {os.path.realpath(toolkit)!a}: builds are found"
            " only by launches that spell it alike."
        )
    if os.environ.get("SGLANG_CACHE_DIR"):
        found.append(
            "SGLANG_CACHE_DIR is set, but the JIT cache does not follow it:"
            f" set {sglang_jitfix.ROOT}."
        )
    return found


def show(report: dict[str, Any]) -> None:
    """Print *report* for people; paths are quoted where they hold anything unusual."""
    on = "on" if report["on"] else "off"
    affected = "known to have the fault" if report["sglang_known_affected"] else "not known"
    sglang = f"{report['sglang_version']}, {affected}" if report["sglang_version"] else "not found"
    given = "unset" if report["root_given"] is None else ascii(report["root_given"])
    if report["root_default"]:
        given += f", default {report['root_default']}"
    poison = "no cache yet"
    if report["poisoned_leaves"] is not None:
        poison = (
            f"{output.plural(report['poisoned_leaves'], 'leaf', 'leaves')};"
            f" {output.plural(report['wasted_compiles'], 'compile')} and"
            f" {output.size(report['wasted_bytes'])} wasted on copies"
        )
    rows = [
        ("shim", f"{report['shim_version']}, {on}: {report['why']}"),
        ("start-up file", report["startup_file"] or "not installed"),
        ("python", report["python"]),
        ("sglang", sglang),
        ("root given", f"{report['root_variable']}: {given}"),
        ("root resolved", ascii(report["root_resolved"]) if report["root_resolved"] else "unknown"),
        *(("link", f"{link['link']!a} -> {link['target']!a}") for link in report["links"]),
        ("poisoned", poison),
        *(("hint", hint) for hint in report["hints"]),
    ]
    for name, text in rows:
        print(f"{name:15}{text}")
