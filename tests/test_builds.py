"""Real builds by the real ``load_jit``, for every spelling of the root.

With the shim an interpreter is started with the spelling, and the variable that it hands
down to its children, the real path, is given to two that load, the second one forbidden to
compile. Without the shim they are given the spelling itself. They are forked from a process
that has imported SGLang. (Fresh ones all along: eight at once below, and in test_verify.py.)
"""

from __future__ import annotations

import os
import pwd
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forks import Forks, forks, hands_down
from sglang_jitfix import ROOT
from spellings import SPELLINGS, Place, lay_out
from support import environment, finish_probe, staging_entries, start_probe


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return lay_out(tmp_path.resolve())


@pytest.fixture(scope="module")
def on(source: Path) -> Iterator[Forks]:
    """Loads in processes with the shim."""
    with forks(source, environment(None)) as running:
        yield running


@pytest.fixture(scope="module")
def off(source: Path) -> Iterator[Forks]:
    """Loads in processes with the shim off: nothing looks at their variables before SGLang does."""
    with forks(source, environment(None, "off")) as running:
        yield running


def load_twice(processes: Forks, variables: dict[str, str], place: Place) -> tuple[int, bool, int]:
    """The compiles of one process, whether a second one hits, and the staging entries then."""
    [compiles] = processes.load(1, variables, place.folder).compiles
    return compiles, processes.hits(variables, place.folder), len(staging_entries(place.folder))


GOOD = (1, True, 0)
FAULT = (1, False, 1)


def below(folder: Path) -> Place:
    folder.mkdir()
    return lay_out(folder.resolve())


def check(
    on: Forks,
    off: Forks,
    given: str,
    tmp_path: Path,
    lay: Callable[[Path], Place] = below,
) -> None:
    """One compile and no staging entry with the shim; without it, the fault.

    *lay* makes a folder for each; in *given* {0} is its path, {1} its name.
    """
    place = lay(tmp_path / "on")
    variables = hands_down(at(place, given), place.folder, **place.env)
    assert variables[ROOT] == os.path.realpath(variables[ROOT])
    assert load_twice(on, variables, place) == GOOD

    place = lay(tmp_path / "off")
    variables = {ROOT: at(place, given), **place.env}
    assert load_twice(off, variables, place) == FAULT


def at(place: Place, given: str) -> str:
    return given.replace("{0}", str(place.folder)).replace("{1}", place.folder.name)


@pytest.mark.parametrize("name", [name for name in SPELLINGS if name != "not UTF-8"])
def test_second_process_compiles_nothing(on: Forks, off: Forks, tmp_path: Path, name: str) -> None:
    check(on, off, SPELLINGS[name], tmp_path)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        # tvm_ffi loads no path that is not UTF-8; by its real path the same folder works.
        (os.fsdecode(b"li\xff\xfe"), "UnicodeEncodeError"),
        # SGLang cannot make the folder that a dangling link points to; the shim names it.
        ("dangling", "FileExistsError"),
    ],
    ids=["not UTF-8", "dangling"],
)
def test_link_that_fails_without_the_shim(
    on: Forks, off: Forks, place: Place, name: str, error: str
) -> None:
    given = str(place.folder / name)
    with pytest.raises(AssertionError, match=error):
        off.load(1, {ROOT: given, **place.env}, place.folder)
    assert load_twice(on, hands_down(given, place.folder, **place.env), place) == GOOD


@pytest.fixture
def real_home() -> Iterator[Path]:
    """A folder in the home that the passwd entry names, for ``~user`` reads no variable."""
    user = pwd.getpwuid(os.geteuid())
    folder = Path(tempfile.mkdtemp(prefix=".sglang-jitfix-test-", dir=user.pw_dir))
    yield folder
    shutil.rmtree(folder)


def test_home_of_a_named_user(on: Forks, off: Forks, tmp_path: Path, real_home: Path) -> None:
    user = pwd.getpwuid(os.geteuid()).pw_name

    def lay(folder: Path) -> Place:
        place = Place(real_home / folder.name)
        (place.folder / "real").mkdir(parents=True)
        (place.folder / "link").symlink_to("real")
        return place

    check(on, off, f"~{user}/{real_home.name}/{{1}}/link/cache", tmp_path, lay)


@pytest.fixture(scope="module")
def target(off: Forks, tmp_path_factory: pytest.TempPathFactory) -> str:
    """SGLang's name for the compile target, the first folder below the root."""
    root = tmp_path_factory.mktemp("target")
    off.load(1, {ROOT: str(root)})
    [folder] = root.iterdir()
    return folder.name


def test_link_below_a_canonical_root(on: Forks, off: Forks, tmp_path: Path, target: str) -> None:
    """Only the manifest writer can help here: the root itself needs no change."""

    def lay(folder: Path) -> Place:
        place = below(folder)
        (place.folder / "root").mkdir()
        (place.folder / "root" / target).symlink_to(place.folder / "deep/real")
        return place

    check(on, off, "{0}/root", tmp_path, lay)


def test_root_set_after_sglang_is_loaded(on: Forks, off: Forks, tmp_path: Path) -> None:
    assert load_twice(on, {ROOT: "link"}, below(tmp_path / "on")) == GOOD
    assert load_twice(off, {ROOT: "link"}, below(tmp_path / "off")) == FAULT


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
    answer = off.load(8, {ROOT: "link/cold", **place.env}, place.folder)
    assert answer.compiles == [1] * 8
    assert len(staging_entries(place.folder)) == 8
