"""``sglang-jitfix explain`` against real launches that may not compile, in many environments."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cachekit import (
    DEPENDENCIES,
    cuda_home,
    jitfix,
    own_unit,
    write_leaf,
    write_poisoned,
    write_scope,
)
from launches import MODULES, ON_THE_GPU, SOURCES, Launches, module_of, write_sources
from sglang_jitfix import ROOT
from stack import FORBID
from support import environment, new_environment, run, site_packages

EVERY = list(MODULES)
POISONED = [name for name in EVERY if "poisoned" in name]


class Place(NamedTuple):
    """A folder with the sources, a cache of all modules in ``cache``, and ``link`` to it."""

    folder: Path
    source: Path
    on: Launches
    off: Launches

    @property
    def cache(self) -> Path:
        return self.folder / "cache"


def fill(launches: Launches, folder: Path) -> None:
    """Build all modules in ``folder/cache``, those that are to be poisoned through a link."""
    (folder / "cache").mkdir()
    (folder / "link").symlink_to("cache")
    for root, poisoned in (("cache", False), ("link", True)):
        names = [name for name in EVERY if (name in POISONED) == poisoned]
        built = launches.load(names, {ROOT: str(folder / root)})
        assert built == dict.fromkeys(names, "built")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("launches").resolve()
    source = write_sources(folder / "source")
    variables = {"CUDA_HOME": cuda_home()}
    started = []
    try:
        for shim in ("on", "off"):
            started.append(Launches(source, environment(None, shim, **variables)))
        made = Place(folder, source, *started)
        fill(made.off, folder)
        yield made
    finally:
        for launches in started:
            launches.end()


class Environment(NamedTuple):
    """What a launch is given, what of the modules it hits, and what explain says of the rest."""

    variables: dict[str, str]
    hits: list[str]
    differs: frozenset[str] = frozenset()
    advice: str | None = None  # part of it
    path: str = ""


CPP = [name for name in EVERY if name not in ON_THE_GPU]


def same(place: Place) -> Environment:
    return Environment({}, EVERY)


def toolkit_through_a_link(place: Place) -> Environment:
    (place.folder / "toolkit").symlink_to(cuda_home())
    home = str(place.folder / "toolkit")
    return Environment(
        {"CUDA_HOME": home}, [], frozenset({"nvcc"}), f"with CUDA_HOME={cuda_home()} "
    )


def toolkit_with_a_slash(place: Place) -> Environment:
    home = cuda_home()
    return Environment(
        {"CUDA_HOME": f"{home}/"}, CPP, frozenset({"library path"}), f"CUDA_HOME={home} "
    )


def toolkit_with_dots(place: Place) -> Environment:
    home = f"{cuda_home()}/bin/.."
    return Environment(
        {"CUDA_HOME": home}, [], frozenset({"nvcc"}), "the same CUDA toolkit, spelled otherwise"
    )


def toolkit_by_its_other_variable(place: Place) -> Environment:
    return Environment({"CUDA_HOME": "", "CUDA_PATH": cuda_home()}, EVERY)


def compiler_by_its_default_name(place: Place) -> Environment:
    return Environment({"CXX": "c++"}, EVERY)


def compiler_spelled_out(place: Place) -> Environment:
    path = shutil.which("c++")
    assert path is not None
    return Environment(
        {"CXX": path}, [], frozenset({"cxx"}), "the same compiler, spelled otherwise"
    )


def compiler_of_another_version(place: Place) -> Environment:
    return Environment({"CXX": str(wrapper(place))}, [], frozenset({"cxx"}))


def compiler_of_that_name_replaced(place: Place) -> Environment:
    path = f"{wrapper(place).parent}:{os.environ['PATH']}"
    return Environment({"PATH": path}, [], frozenset({"versions"}))


def wrapper(place: Place) -> Path:
    """A C++ compiler that says it is another."""
    path = place.folder / "bin" / "c++"
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec echo 99\nexec {shutil.which("c++")} "$@"\n'
    )
    path.chmod(0o755)
    return path


def toolkit_and_compiler(place: Place) -> Environment:
    variables = {"CUDA_HOME": f"{cuda_home()}/./", "CXX": str(wrapper(place))}
    return Environment(variables, [], frozenset({"nvcc", "cxx"}))


def package_of_another_version(place: Place) -> Environment:
    """Made up by its metadata alone."""
    metadata = place.folder / "path" / "torch-99.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 99\n")
    return Environment({}, [], frozenset({"versions"}), path=str(metadata.parents[1]))


def report_of_resources(place: Place) -> Environment:
    return Environment({"SGLANG_JIT_LOG_RESOURCE_USAGE": "1"}, [], frozenset({"flag"}))


def compiling_again_by_order(place: Place) -> Environment:
    return Environment({"SGLANG_JIT_FORCE_RECOMPILE": "1"}, [])


ENVIRONMENTS = [
    same,
    toolkit_through_a_link,
    toolkit_with_a_slash,
    toolkit_with_dots,
    toolkit_by_its_other_variable,
    compiler_by_its_default_name,
    compiler_spelled_out,
    compiler_of_another_version,
    compiler_of_that_name_replaced,
    toolkit_and_compiler,
    package_of_another_version,
    report_of_resources,
    compiling_again_by_order,
]


def compare(
    launches: Launches, root: Path, given: Environment, names: list[str] = EVERY
) -> dict[str, list[dict[str, Any]]]:
    """What explain says, by module, once it is seen to be what launches find."""
    variables = {**given.variables, **FORBID, ROOT: str(root)}
    real = launches.load(names, variables, given.path)
    assert real == {name: "hit" if name in given.hits else "miss" for name in names}
    status, rows, said = launches.explain(variables, "--root", str(root), path=given.path)
    assert status == 0, said
    told: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for row in rows:
        (name,) = (name for name in MODULES if module_of(name) == row["module"])
        if name in told:
            told[name].append(row)
    assert {name: {row["verdict"] for row in told[name]} for name in names} == {
        name: {real[name]} for name in names
    }
    for row in (row for rows in told.values() for row in rows):
        assert row["hit"] == (row["verdict"] == "hit")
        reasons = row["differs"] or row["changed"] or row["vanished"] or row["reason"]
        assert row["hit"] or reasons, "a miss that names no reason"
    return told


@pytest.mark.parametrize("make", ENVIRONMENTS, ids=lambda make: make.__name__)
def test_environment(place: Place, make: Callable[[Place], Environment]) -> None:
    given = make(place)
    for name, rows in compare(place.on, place.cache, given).items():
        if name not in given.hits:
            for row in rows:
                assert {item["what"] for item in row["differs"]} == given.differs
                assert (given.advice or "") in (row["advice"] or "")
                assert bool(row["advice"]) == bool(given.advice)
                if row["advice"]:
                    follow(place, given, name, row["advice"])
    every = 0 if given.hits == EVERY else 1
    status, _, said = place.on.explain(
        given.variables, "--check", "--root", str(place.cache), path=given.path
    )
    assert status == every
    for name in EVERY:
        assert (f"{module_of(name)}: no build" in said) == (name not in given.hits)


def follow(place: Place, given: Environment, name: str, advice: str) -> None:
    """A launch that does as it is told hits."""
    words = advice.split("with ")[1].removesuffix(" SGLang would use it").split(" ")
    settings = dict(word.split("=", 1) for word in words)
    variables = {**given.variables, **settings, **FORBID, ROOT: str(place.cache)}
    assert place.on.load([name], variables) == {name: "hit"}


def test_dependency_that_changed_or_vanished(place: Place) -> None:
    header = place.source / "scale.h"
    try:
        header.write_text("#define SCALE 4\n")
        for rows in compare(place.on, place.cache, Environment({}, [])).values():
            assert [(row["changed"], row["vanished"]) for row in rows] == [([str(header)], [])]
            assert [row["differs"] for row in rows] == [[]]
        header.unlink()
        for rows in compare(place.on, place.cache, Environment({}, [])).values():
            assert [(row["changed"], row["vanished"]) for row in rows] == [([], [str(header)])]
        source = place.source / "whole.cpp"
        header.write_text(SOURCES["scale.h"])
        source.write_text(SOURCES["whole.cpp"] + "// edited\n")
        given = Environment({}, [name for name in EVERY if name != "whole"])
        (row,) = compare(place.on, place.cache, given)["whole"]
        assert (row["changed"], row["differs"]) == ([str(source)], [])
    finally:
        write_sources(place.source)


def test_shim_off(place: Place) -> None:
    """Then poisoned leaves are not found, and explain says what is gone."""
    given = Environment({}, [name for name in EVERY if name not in POISONED])
    for name, rows in compare(place.off, place.cache, given).items():
        units = [re.search(r"/\.staging-\w+/[\w.]+$", path) for path in rows[0]["vanished"]]
        assert len(units) == (1 + (name in ON_THE_GPU) if name in POISONED else 0)
        assert all(units)


def test_cache_that_was_moved_or_is_linked(place: Place) -> None:
    copy = shutil.copytree(place.cache, place.folder / "moved")
    for root in (copy, place.folder / "link"):
        compare(place.on, root, Environment({}, EVERY))


def test_cache_from_another_virtual_environment(place: Place) -> None:
    """SGLang and tvm_ffi lie in it, at another path; all else is linked to the one here."""
    folder = place.folder / "other" / "environment"
    executable = new_environment(folder)
    here, there = (site_packages(Path(python)) for python in (sys.executable, executable))
    for entry in here.iterdir():
        if entry.name in ("sglang", "tvm_ffi"):
            shutil.copytree(entry, there / entry.name, symlinks=True)
        elif not (there / entry.name).exists():
            (there / entry.name).symlink_to(entry)
    variables = environment(None, "off", CUDA_HOME=cuda_home())
    there_launches = Launches(place.source, variables, str(executable))
    try:
        fill(there_launches, folder)
    finally:
        there_launches.end()
    (recorded,) = (folder / "cache").glob("*/sgl_kernel_jit_plain/*/deps-*/build.ninja")
    assert str(there) in recorded.read_text()
    compare(place.on, folder / "cache", Environment({}, EVERY))


def test_check(place: Place) -> None:
    """One module without a build fails it, one that cannot be told is no success either."""
    root = place.folder / "checked"
    (root / "sm00").mkdir(parents=True)

    def check(*arguments: str) -> tuple[int, str]:
        status, _, said = place.on.explain({}, "--check", "--root", str(root), *arguments)
        return status, said.removeprefix("importing SGLang\n")

    assert check() == (2, "sglang-jitfix: there is no build to check\n")
    good = module_of("plain")
    shutil.copytree(place.cache / "sm00" / good, root / "sm00" / good)
    assert check() == (0, "")
    module = shutil.copytree(place.cache / "sm00" / good, root / "sm00" / "sgl_kernel_jit_other")
    (leaf,) = module.glob("*/deps-*")
    (leaf / f"{good}.so").rename(leaf / "sgl_kernel_jit_other.so")
    told = "sglang-jitfix: sm00/sgl_kernel_jit_other: no build that a launch here would use\n"
    assert check() == (1, told), "the name is part of the key"
    (leaf / "build.ninja").unlink()
    assert check() == (2, "sglang-jitfix: sm00/sgl_kernel_jit_other: it cannot be told\n")
    assert check("plain") == (0, "")
    shutil.copytree(root / "sm00" / good, root / "gfx942" / good)
    status, said = check("plain")
    assert (status, said) == (2, f"sglang-jitfix: gfx942/{good}: it cannot be told\n")
    # A build for a GPU that a launch takes for another one.
    shutil.rmtree(root / "gfx942")
    shutil.copytree(root / "sm00" / good, root / "sm90" / good)
    status, rows, _ = place.on.explain({}, "--root", str(root), "plain")
    (row,) = (row for row in rows if row["target"] == "sm90")
    assert row["differs"] == [{"what": "architecture", "built": "sm90", "here": "sm90a"}]


def lay_traps(root: Path) -> int:
    """A cache of what never ends, or has no end worth waiting for; how many leaves it has."""
    fifo, sparse = root.parent / "fifo", root.parent / "sparse"
    os.mkfifo(fifo)
    with open(sparse, "wb") as file:
        file.truncate(1 << 40)
    scopes = (write_scope(root, f"m{number}", f"{number:016x}") for number in itertools.count())
    traps = (fifo, sparse, Path("/dev/zero"), Path("/proc/kmsg"), root)
    leaves = []
    for trap in traps:
        for name in ("sgl_deps.json", "build.ninja", "main.cpp", "library"):
            leaf = write_poisoned(next(scopes))
            (leaf / "build.ninja").write_text("build main_0.o: compile_cxx main.cpp\n")
            place = leaf / (f"{leaf.parents[1].name}.so" if name == "library" else name)
            place.unlink(missing_ok=True)
            place.symlink_to(trap)
            leaves.append(leaf)
        leaves.append(write_leaf(next(scopes), [("abs", str(trap), "1" * 64)]))
    leaves.append(write_leaf(next(scopes), [("abs", "/\0", "1" * 64)]))
    leaves.append(write_leaf(next(scopes), [("abs", "/x" * 9999, "1" * 64)]))
    scope = next(scopes)
    leaves.append(write_leaf(scope, [own_unit(scope) for _ in range(50_000)] + DEPENDENCIES))
    leaves.append(write_poisoned(write_scope(root, "_".join("m" * 60))))
    deep = write_poisoned(next(scopes))
    here = os.getcwd()
    os.chdir(deep)
    for _ in range(1500):
        os.mkdir("d")
        os.chdir("d")
    os.chdir(here)
    scope = next(scopes)
    os.mkfifo(scope / ".lock")
    leaves += [deep, write_poisoned(scope)]
    for number in range(1100):  # more than a process may have files open
        leaves.append(scope / f"deps-{number}")
        (leaves[-1] / "sgl_deps.json").mkdir(parents=True)
    return len(leaves)


def test_nothing_that_a_cache_holds_stops_a_command(place: Place) -> None:
    root = place.folder / "traps" / "cache"
    root.mkdir(parents=True)
    try:
        try_all_commands(place, root, lay_traps(root))
    finally:
        run("rm", "-rf", root)  # deeper than pytest's own cleaning can go


def try_all_commands(place: Place, root: Path, count: int) -> None:
    status, rows, _ = place.on.explain({}, "--root", str(root))
    assert (status, len(rows)) == (0, count)
    assert not any(row["hit"] for row in rows)
    for command, status in (
        (["ls", "--json"], 0),
        (["doctor"], 0),
        (["repair", "--dry-run"], 1),
        (["repair"], 2),  # there is one that it cannot write
    ):
        limit = ["sh", "-c", 'ulimit -v 1000000; exec "$@"', "sh", sys.executable]
        done = jitfix(*command, root, prefix=limit)
        assert done.returncode == status, done.stderr
        if command[0] == "ls":
            assert len(json.loads(done.stdout)) == count
