"""Actors of a Ray cluster that share one cache root, each with its own spelling of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import ray_cluster
from spellings import Place, lay_out
from support import environment, manifests, staging_entries


@pytest.fixture
def ray_folder() -> Iterator[Path]:
    """A folder for Ray's own files; whatever process still uses it is ended afterwards."""
    # Not tmp_path: the sockets in it must fit into 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    yield folder
    # Workers end by themselves once they miss their node, but take their time.
    while running := of_cluster(folder):  # a node that still runs starts new workers
        for process in running:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        psutil.wait_procs(running, timeout=10)
    shutil.rmtree(folder)


def of_cluster(folder: Path) -> list[psutil.Process]:
    """The processes of the cluster whose files are in *folder*, as their environment tells."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RAY_TMPDIR") == str(folder):
                found.append(process)
        except psutil.Error:  # gone, or another user's
            pass
    return found


def run_cluster(place: Place, source: Path, shim: str, ray_folder: Path) -> list[dict[str, Any]]:
    """The reports of four actors, by two on each node, all at once.

    In turn: the driver's variable; `runtime_env`, relative; `runtime_env`, absolute; no
    variable at all, where SGLang's default names the same root. The first two go to
    another working directory before they load anything.
    """
    elsewhere = place.folder / "elsewhere"
    elsewhere.mkdir()
    sglang = place.folder / "deep/moved-home/.cache/sglang"
    sglang.parent.mkdir()
    sglang.symlink_to(place.folder / "deep/real")
    actors = [
        {"node": "inherits", "root": None, "chdir": str(elsewhere)},
        {"node": "inherits", "root": "./one/jit", "chdir": str(elsewhere)},
        {"node": "lacks", "root": f"{place.folder}/link/jit", "chdir": None},
        {"node": "lacks", "root": None, "chdir": None},
    ]
    settings = {**ray_cluster.SETTINGS, **place.env, "RAY_TMPDIR": str(ray_folder)}
    driver = subprocess.Popen(
        [
            sys.executable,
            ray_cluster.__file__,
            json.dumps({"source": str(source), "actors": actors}),
        ],
        env=environment("link/jit", shim, **settings),
        cwd=place.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = driver.communicate(timeout=750)
    finally:
        driver.kill()
        driver.wait()
    assert driver.returncode == 0, err
    reports: list[dict[str, Any]] = json.loads(out.splitlines()[-1])
    return reports


def test_one_compile_for_all_actors(tmp_path: Path, source: Path, ray_folder: Path) -> None:
    place = lay_out(tmp_path)
    reports = run_cluster(place, source, "on", ray_folder)
    root = str(tmp_path / "deep/real/jit")
    assert sorted(report["compiles"] for report in reports) == [0, 0, 0, 1]
    assert [report["root"] for report in reports] == [root] * 4
    assert [report["variable"] for report in reports] == [root] * 4
    # The first was given to the driver, which had made it canonical for its children. Ray
    # sets the variables of a runtime_env before it starts the worker's interpreter
    # (RuntimeEnvContext.exec_worker), so the start-up file finds them there.
    assert [report["found"] for report in reports] == [
        root,
        "./one/jit",
        f"{tmp_path}/link/jit",
        None,
    ]
    assert [report["cwd"] for report in reports] == [
        *[str(tmp_path / "elsewhere")] * 2,
        *[str(tmp_path)] * 2,
    ]
    assert len(manifests(tmp_path)) == 1
    assert staging_entries(tmp_path) == []


def test_with_the_shim_off_each_actor_compiles(
    tmp_path: Path, source: Path, ray_folder: Path
) -> None:
    place = lay_out(tmp_path)
    reports = run_cluster(place, source, "off", ray_folder)
    assert [report["compiles"] for report in reports] == [1] * 4
    assert [report["found"] for report in reports] == [
        "link/jit",
        "./one/jit",
        f"{tmp_path}/link/jit",
        None,
    ]
    assert len(staging_entries(tmp_path)) == 4
    # Both relative ones were lost on the way to the new working directory.
    assert (tmp_path / "elsewhere/link/jit").is_dir()
    assert (tmp_path / "elsewhere/one/jit").is_dir()
