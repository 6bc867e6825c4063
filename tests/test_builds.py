"""Real builds by the real ``load_jit``, for every spelling of the root.

A process is started with the spelling, imports SGLang, and forks the two that load, one
after the other. (Fresh ones all along: eight at once below, and `sglang-jitfix verify`.)
"""

from __future__ import annotations

import os
import pwd
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forks import Forks, forks
from sglang_jitfix import ROOT
from spellings import SPELLINGS, Place, lay_out
from support import environment, finish_probe, python, staging_entries, start_probe


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return lay_out(tmp_path.resolve())


@pytest.fixture(scope="module")
def off(source: Path) -> Iterator[Forks]:
    """Loads in processes with the shim off: nothing looks at their variables before SGLang does."""
    with forks(source, environment(None, "off")) as running:
        yield running


def variables(given: str, place: Place) -> dict[str, str]:
    """What a process at *place* is given, with *given* as root."""
    return {ROOT: given, **place.env}


def two_loads(source: Path, given: str, place: Place) -> list[int]:
    """Compiles of two processes, one after the other, with the shim and *given* as root."""
    with forks(source, environment(given, **place.env), place.folder) as on:
        return on.load_twice({})


def below(folder: Path) -> Place:
    folder.mkdir()
    return lay_out(folder.resolve())


def check(
    source: Path, off: Forks, given: str, tmp_path: Path, lay: Callable[[Path], Place] = below
) -> None:
    """One compile and no staging entry with the shim; without it, the fault.

    *lay* makes a folder for each; in *given* {0} is its path, {1} its name.
    """
    place = lay(tmp_path / "on")
    compiles = two_loads(source, at(place, given), place)
    assert (compiles, len(staging_entries(place.folder))) == ([1, 0], 0)

    place = lay(tmp_path / "off")
    compiles = off.load_twice(variables(at(place, given), place), place.folder)
    assert (compiles, len(staging_entries(place.folder))) == ([1, 1], 2)


def at(place: Place, given: str) -> str:
    return given.replace("{0}", str(place.folder)).replace("{1}", place.folder.name)


@pytest.mark.parametrize("name", [name for name in SPELLINGS if name != "not UTF-8"])
def test_second_process_compiles_nothing(
    source: Path, off: Forks, tmp_path: Path, name: str
) -> None:
    check(source, off, SPELLINGS[name], tmp_path)


def test_link_whose_name_is_not_utf8(source: Path, off: Forks, place: Place) -> None:
    """tvm_ffi loads no path that is not UTF-8; by its real path the same folder works."""
    given = str(place.folder / os.fsdecode(b"li\xff\xfe"))
    with pytest.raises(AssertionError, match="UnicodeEncodeError"):
        off.load(1, variables(given, place), place.folder)
    assert two_loads(source, given, place) == [1, 0]
    assert staging_entries(place.folder) == []


def test_dangling_link(source: Path, off: Forks, place: Place) -> None:
    """SGLang cannot make the folder that a dangling link points to; the shim names it."""
    with pytest.raises(AssertionError, match="FileExistsError"):
        off.load(1, variables("dangling", place), place.folder)
    assert two_loads(source, "dangling", place) == [1, 0]
    assert staging_entries(place.folder) == []


@pytest.fixture
def real_home() -> Iterator[Path]:
    """A folder in the home that the passwd entry names, for ``~user`` reads no variable."""
    user = pwd.getpwuid(os.geteuid())
    folder = Path(tempfile.mkdtemp(prefix=".sglang-jitfix-test-", dir=user.pw_dir))
    yield folder
    shutil.rmtree(folder)


def test_home_of_a_named_user(source: Path, off: Forks, tmp_path: Path, real_home: Path) -> None:
    user = pwd.getpwuid(os.geteuid()).pw_name

    def lay(folder: Path) -> Place:
        place = Place(real_home / folder.name)
        (place.folder / "real").mkdir(parents=True)
        (place.folder / "link").symlink_to("real")
        return place

    check(source, off, f"~{user}/{real_home.name}/{{1}}/link/cache", tmp_path, lay)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    """SGLang's name for the compile target, the first folder below the root."""
    code = "from sglang.kernels.jit.utils.compile import cache; print(cache._target_tag())"
    env = environment(tmp_path_factory.mktemp("target"))
    return python(code, env=env).split()[-1]


def test_link_below_a_canonical_root(source: Path, off: Forks, tmp_path: Path, target: str) -> None:
    """Only the manifest writer can help here: the root itself needs no change."""

    def lay(folder: Path) -> Place:
        place = below(folder)
        (place.folder / "root").mkdir()
        (place.folder / "root" / target).symlink_to(place.folder / "deep/real")
        return place

    check(source, off, "{0}/root", tmp_path, lay)


def test_root_set_after_sglang_is_loaded(source: Path, off: Forks, tmp_path: Path) -> None:
    found = {}
    with forks(source, environment(None)) as on:
        for name, processes in {"on": on, "off": off}.items():
            place = below(tmp_path / name)
            compiles = processes.load_twice({ROOT: "link"}, place.folder)
            found[name] = compiles, len(staging_entries(place.folder))
    assert found == {"on": ([1, 0], 0), "off": ([1, 1], 2)}


def test_eight_processes_at_once(source: Path, place: Place) -> None:
    """On a cold linked root they wait for one another's lock; what then counts is the look-up."""
    env = environment("link/cold", **place.env)
    processes = [start_probe(source, env, place.folder) for _ in range(8)]
    try:
        reports = [finish_probe(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert sorted(report["compiles"] for report in reports) == [0] * 7 + [1]
    assert staging_entries(place.folder) == []


def test_eight_processes_at_once_without_the_shim(off: Forks, place: Place) -> None:
    answer = off.load(8, variables("link/cold", place), place.folder)
    assert answer.compiles == [1] * 8
    assert len(staging_entries(place.folder)) == 8
