"""``sglang-jitfix verify``: the fault and its absence, on the user's own machine."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import sglang_jitfix
from sglang_jitfix import releases
from sglang_jitfix.cache.errors import CommandError, require_sglang
from sglang_jitfix.cli import output, probe

PROCESSES = 3


def run(arguments: argparse.Namespace) -> int:
    """Run both columns, print the table, return 0 if the shim's is one compile, then none.

    Raises CommandError if SGLang, the compiler or ninja is missing, or a probe fails.
    """
    release = check_parts()
    # SIGTERM as an exception, so that the temporary folder goes and a child is ended.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with tempfile.TemporaryDirectory(prefix="sglang-jitfix-") as folder:
            output.say(f"SGLang {release}, {sys.executable}")
            source = Path(folder, "probe.cpp")
            source.write_text(probe.SOURCE, encoding="utf-8")
            off, off_entries = column(Path(folder), source, "off")
            on, on_entries = column(Path(folder), source, "on")
    except OSError as error:
        raise CommandError(f"cannot use the temporary folder: {error}") from error

    print(f"{'':16}{'shim off':>20}{'shim on':>20}")
    print(f"{'':16}" + f"{'compiles':>10}{'seconds':>10}" * 2)
    for number, (left, right) in enumerate(zip(off, on, strict=True), 1):
        cells = "".join(f"{one['compiles']:>10}{one['seconds']:>10.2f}" for one in (left, right))
        print(f"{f'process {number}':16}{cells}")
    print(f"{'staging entries':16}{off_entries:>10}{'':10}{on_entries:>10}")

    expected = [1] + [0] * (PROCESSES - 1)
    if [one["compiles"] for one in on] != expected or on_entries:
        print("The shim does not work here: run `sglang-jitfix doctor` and follow its hints.")
        return 1
    if [one["compiles"] for one in off] == expected:
        print("This SGLang does not have the fault: it needs no shim.")
    else:
        print("The shim works here: one compile, then none.")
    if sglang_jitfix.is_set(sglang_jitfix.DISABLE):
        print(f"But {sglang_jitfix.DISABLE} is set in this shell: your launches run without it.")
    return 0


def check_parts() -> str:
    """SGLang's version; raises CommandError if a part that SGLang builds with is missing."""
    require_sglang()
    compiler = os.environ.get("CXX") or "c++"
    for tool, remedy in (
        (compiler, "install one (`apt-get install g++` on Debian and Ubuntu), or set CXX"),
        ("ninja", "activate the environment, or `pip install ninja`"),
    ):
        if shutil.which(tool) is None:
            raise CommandError(f"SGLang builds with {tool!r}, which is not on PATH: {remedy}")
    return releases.installed() or "of unknown version"


def column(folder: Path, source: Path, shim: str) -> tuple[list[dict[str, Any]], int]:
    """One probe report for each process with the shim ``"on"`` or ``"off"``, and the number
    of staging entries in the manifests they left."""
    real = folder / shim
    real.mkdir()
    link = folder / f"link-{shim}"
    link.symlink_to(real)
    environment = clean_environment(shim, link / "cache")
    reports = []
    for number in range(1, PROCESSES + 1):
        output.say(
            f"shim {shim}, process {number} of {PROCESSES}: importing SGLang and loading the module"
        )
        reports.append(probe_once(source, environment))
    return reports, staging_entries(real)


def clean_environment(shim: str, root: Path) -> dict[str, str]:
    """The environment of a probe: ours, less all that would change what is measured."""
    skewing = ("JIT_CACHE_DIR", "JIT_CACHE_KEEP", "JIT_FORCE_RECOMPILE", "CRASH_ON_JIT_COMPILE")
    names = {f"{prefix}_{name}" for prefix in ("SGL", "SGLANG") for name in skewing}
    environment = {k: v for k, v in os.environ.items() if k not in names}
    environment[sglang_jitfix.ROOT] = str(root)
    environment[sglang_jitfix.DISABLE] = "1" if shim == "off" else ""
    return environment


def probe_once(source: Path, environment: dict[str, str]) -> dict[str, Any]:
    """The report of one fresh probe process; raises CommandError if it fails."""
    child = subprocess.Popen(
        [sys.executable, "-m", "sglang_jitfix.cli.probe", str(source)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # so that its compiler can be ended with it
    )
    try:
        out, err = child.communicate()
    except BaseException:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()  # closed by the last of them
        raise
    if child.returncode != 0:
        print(err, file=sys.stderr, end="")
        last = (err.strip() or f"exit status {child.returncode}").splitlines()[-1]
        raise CommandError(f"SGLang could not build or load the module: {last}")
    report: dict[str, Any] = json.loads(out.splitlines()[-1])
    return report


def staging_entries(root: Path) -> int:
    """How many dependencies in the manifests under *root* lie in a staging folder."""
    return sum(
        "/.staging-" in entry[1]
        for manifest in root.rglob("sgl_deps.json")
        for entry in json.loads(manifest.read_bytes())
    )
