"""Real builds by the real ``load_jit``, in fresh processes, for every spelling of the root."""

from __future__ import annotations

import os
import pwd
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spellings import SPELLINGS, Place, lay_out
from support import environment, finish_probe, load_once, python, staging_entries, start_probe


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return lay_out(tmp_path.resolve())


def two_loads(source: Path, given: str, place: Place, shim: str) -> list[int]:
    """Compiles of two fresh processes, one after the other, with *given* as root."""
    env = environment(given, shim, **place.env)
    return [load_once(source, env, place.folder)["compiles"] for _ in range(2)]


def check(source: Path, given: str, tmp_path: Path, lay: Any = lay_out) -> None:
    """One compile and no staging entry with the shim; without it, the fault."""
    found = {}
    for shim in ("on", "off"):
        place = lay(tmp_path / shim)
        at_place = given.replace("{0}", str(place.folder))
        compiles = two_loads(source, at_place, place, shim)
        found[shim] = (compiles, len(staging_entries(place.folder)))
    assert found == {"on": ([1, 0], 0), "off": ([1, 1], 2)}


def below(folder: Path) -> Place:
    folder.mkdir()
    return lay_out(folder.resolve())


@pytest.mark.parametrize("name", [name for name in SPELLINGS if name != "not UTF-8"])
def test_second_process_compiles_nothing(source: Path, tmp_path: Path, name: str) -> None:
    check(source, SPELLINGS[name], tmp_path, below)


def test_link_whose_name_is_not_utf8(source: Path, place: Place) -> None:
    """tvm_ffi loads no path that is not UTF-8; by its real path the same folder works."""
    given = str(place.folder / os.fsdecode(b"li\xff\xfe"))
    env = environment(given, "off", **place.env)
    with pytest.raises(AssertionError, match="UnicodeEncodeError"):
        load_once(source, env, place.folder)
    assert two_loads(source, given, place, "on") == [1, 0]
    assert staging_entries(place.folder) == []


def test_dangling_link(source: Path, place: Place) -> None:
    """SGLang cannot make the folder that a dangling link points to; the shim names it."""
    env = environment("dangling", "off", **place.env)
    with pytest.raises(AssertionError, match="FileExistsError"):
        load_once(source, env, place.folder)
    assert two_loads(source, "dangling", place, "on") == [1, 0]
    assert staging_entries(place.folder) == []


@pytest.fixture
def real_home() -> Iterator[Path]:
    """A folder in the home that the passwd entry names, for ``~user`` reads no variable."""
    user = pwd.getpwuid(os.geteuid())
    folder = Path(tempfile.mkdtemp(prefix=".sglang-jitfix-test-", dir=user.pw_dir))
    yield folder
    shutil.rmtree(folder)


def test_home_of_a_named_user(source: Path, tmp_path: Path, real_home: Path) -> None:
    user = pwd.getpwuid(os.geteuid()).pw_name
    found = {}
    for shim in ("on", "off"):
        (real_home / shim).mkdir()
        (real_home / f"link-{shim}").symlink_to(real_home / shim)
        given = f"~{user}/{real_home.name}/link-{shim}/cache"
        compiles = two_loads(source, given, Place(tmp_path), shim)
        found[shim] = (compiles, len(staging_entries(real_home / shim)))
    assert found == {"on": ([1, 0], 0), "off": ([1, 1], 2)}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """SGLang's name for the compile target, the first folder below the root."""
    code = "from sglang.kernels.jit.utils.compile import cache; print(cache._target_tag())"
    env = environment(tmp_path_factory.mktemp("target"))
    return python(code, env=env).split()[-1]


def test_link_below_a_canonical_root(source: Path, tmp_path: Path, target: str) -> None:
    """Only the manifest writer can help here: the root itself needs no change."""

    def lay(folder: Path) -> Place:
        place = below(folder)
        (place.folder / "root").mkdir()
        (place.folder / "root" / target).symlink_to(place.folder / "deep/real")
        return place

    check(source, "{0}/root", tmp_path, lay)


SET_LATE = """
import os, sys
from sglang.kernels.jit.utils.compile import cache
from sglang_jitfix.cli import probe
os.environ["SGLANG_JIT_CACHE_DIR"] = "link"
probe.main(sys.argv[1])
"""


def test_root_set_after_sglang_is_loaded(source: Path, tmp_path: Path) -> None:
    found = {}
    for shim in ("on", "off"):
        place = below(tmp_path / shim)
        env = environment(None, shim, **place.env)
        runs = [
            python(SET_LATE, str(source), env=env, cwd=place.folder).splitlines()[-1]
            for _ in range(2)
        ]
        found[shim] = ['"compiles": 1' in run for run in runs], len(staging_entries(place.folder))
    assert found == {"on": ([True, False], 0), "off": ([True, True], 2)}


@pytest.mark.parametrize(("shim", "compiles"), [("on", 1), ("off", 8)])
def test_eight_processes_at_once(source: Path, place: Place, shim: str, compiles: int) -> None:
    """On a cold linked root they wait for one another's lock; what then counts is the look-up."""
    env = environment("link/cold", shim, **place.env)
    processes = [start_probe(source, env, place.folder) for _ in range(8)]
    try:
        reports = [finish_probe(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert sum(report["compiles"] for report in reports) == compiles
    assert len(staging_entries(place.folder)) == (0 if shim == "on" else 8)
