"""The releases of SGLang in the table, and releases that do not exist yet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forks import forks, hands_down
from sglang_jitfix import ROOT, releases
from support import (
    edited,
    environment,
    made_up_release,
    manifests,
    python,
    run,
    staging_entries,
)

# The environment's own release: every other test of real builds runs on it.
HERE = "0.5.21"


@pytest.mark.parametrize("version", sorted(releases.AFFECTED - {HERE}))
def test_restart_on_each_release(source: Path, tmp_path: Path, version: str) -> None:
    """The release's wheel without its dependencies, laid over the environment's own.

    The first process finds its root by the default and a linked home, the second by
    the variable and the same link, which the shim makes the real path before: both must
    mean the folder that the table says.
    """
    package = tmp_path / "package"
    run("uv", "pip", "install", "-q", "--target", package, "--no-deps", f"sglang=={version}")
    overlay = {"PYTHONPATH": str(package)}
    code = "from sglang_jitfix import releases; print(releases.installed())"
    assert python(code, env=environment(**overlay)) == f"{version}\n"

    default = releases.DEFAULT_ROOT.removeprefix("~/")
    found = {}
    for shim in ("on", "off"):
        place = tmp_path / shim
        (place / "real").mkdir(parents=True)
        (place / "link").symlink_to("real")
        home = {**overlay, "HOME": str(place / "link")}
        root = f"link/{default}"
        variables = hands_down(root, place) if shim == "on" else {ROOT: root}
        with forks(source, environment(None, shim, **home)) as running:
            each: list[dict[str, str]] = [{}, variables]
            compiles = [running.load(1, given, place).compiles[0] for given in each]
        written = manifests(place / "real" / default)
        assert manifests(place) == written
        found[shim] = (compiles, len(written), len(staging_entries(place)))
    assert found == {"on": ([1, 0], 1, 0), "off": ([1, 1], 2, 2)}


LOAD = f"""
import logging, os, sys
logging.basicConfig(level="WARNING", stream=sys.stdout)
from sglang_jitfix.cli import probe
probe.main(sys.argv[1])
print("unset" if "{ROOT}" not in os.environ else "set")
"""


def load(source: Path, place: Path, env: dict[str, str]) -> tuple[dict[str, Any], str, str]:
    """The report of a probe, whether it ends with the root variable set, and all it says."""
    said = python(LOAD, str(source), env=env, cwd=place)
    *_, report, variable = said.splitlines()
    return json.loads(report), variable, said


def test_release_whose_writer_resolves_the_folder_itself(source: Path, tmp_path: Path) -> None:
    line = "    seen: Dict[Tuple[str, str], _DepEntry] = {}\n"
    fixed = edited(line, "    build_dir = build_dir.resolve()\n" + line)
    release = made_up_release(tmp_path / "made-up", "0.5.99", fixed)
    written = {}
    for shim in ("on", "off"):
        place = tmp_path / shim
        (place / "real").mkdir(parents=True)
        (place / "link").symlink_to("real")
        env = environment("link", shim, PYTHONPATH=str(release))
        report, _, said = load(source, place, env)
        assert report["compiles"] == 1
        assert "sglang_jitfix" not in said
        written[shim] = {
            path.relative_to(place): path.read_bytes() for path in manifests(place / "real")
        }
        assert staging_entries(place) == []
    assert len(written["on"]) == 1
    assert written["on"] == written["off"]


def test_release_with_another_default_root(source: Path, tmp_path: Path) -> None:
    """The variable stays unset, so the release's own default is what counts."""
    moved = edited('"~/.cache/sglang/jit"', 'os.path.join(os.environ["SGLANG_CACHE_DIR"], "jit")')
    release = made_up_release(tmp_path / "made-up", "0.5.99", moved)
    found = {}
    for shim in ("on", "off"):
        place = tmp_path / shim
        (place / "real").mkdir(parents=True)
        (place / "link").symlink_to("real")
        elsewhere = {"SGLANG_CACHE_DIR": str(place / "link"), "HOME": str(place / "home")}
        env = environment(None, shim, PYTHONPATH=str(release), **elsewhere)
        report, variable, said = load(source, place, env)
        assert "sglang_jitfix" not in said
        assert report["root"] == f"{place}/link/jit"
        assert len(manifests(place / "real/jit")) == 1
        assert manifests(place / "real/jit") == manifests(place)
        found[shim] = variable, len(staging_entries(place))
    # The writer's hook alone keeps the manifest clean here.
    assert found == {"on": ("unset", 0), "off": ("unset", 1)}
