"""Poisoned leaves that the real SGLang made with the shim off, looked up by the real SGLang."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cachekit import Built, entries_of, is_own, poison, rewrite, set_age, sglang

LIMIT = 100  # leaves that SGLang looks at
FIVE = hashlib.sha256(b"#define SCALE 5\n").hexdigest()  # of scale.h
OTHER = "build-0123456789abcdef"


def leaves_of(root: Path, module: str = "one") -> list[Path]:
    """The leaves of *module*: of "one" that built with 5, then the two built with 3."""
    found = root.glob(f"*/sgl_kernel_jit_{module}/build-*/deps-*")
    return sorted(found, key=lambda leaf: FIVE not in {entry[2] for entry in entries_of(leaf)})


def only(root: Path) -> Path:
    """A leaf of "one" built with 3, the only one that is left."""
    five, leaf, copy = leaves_of(root)
    shutil.rmtree(five)
    shutil.rmtree(copy)
    return leaf


def rename_unit(leaf: Path, change: Callable[[str], str]) -> None:
    """Let *leaf* name another file as its unit."""
    rewrite(leaf, [(e[0], change(e[1]), e[2]) if is_own(e) else e for e in entries_of(leaf)])


def put_unit_back(leaf: Path, text: str) -> None:
    """Let the unit of *leaf* be in a staging folder that exists, and hold *text*."""
    scope = leaf.parent
    folder = scope / f".staging-{32 * '0'}"
    folder.mkdir()
    (folder / "main.cpp").write_text(text)
    rename_unit(leaf, lambda unit: str(folder / "main.cpp"))


def behind(root: Path, leaf: Path, count: int) -> None:
    """Put *count* poisoned copies of the leaf built with 3 in front of *leaf*."""
    three = leaves_of(root)[-1]
    for number in range(count):
        poison(three, age=number)
    set_age(leaf, 10000)


def good_five(root: Path, built: Built) -> Path:
    """The good leaf of "one" built with 5, instead of the poisoned one."""
    poisoned, _, _ = leaves_of(root)
    shutil.rmtree(poisoned)
    (good,) = leaves_of(built.good)
    return shutil.copytree(good, poisoned.parent / good.name)


@dataclass(frozen=True)
class Case:
    """What is done to a copy of the poisoned root, and what a look-up of a module then says."""

    prepare: Callable[[Path, Built], object]
    on: str
    off: str
    scale: int | None
    module: str


CASES: dict[str, Case] = {}


def case(
    on: str, off: str, scale: int | None = 3, module: str = "one"
) -> Callable[[Callable[[Path, Built], object]], None]:
    """Add the decorated function to CASES; *scale* is what scale.h holds then, None: it is gone."""

    def add(prepare: Callable[[Path, Built], object]) -> None:
        CASES[prepare.__name__] = Case(prepare, on, off, scale, module)

    return add


@case(on="hit", off="miss")
def moved(root: Path, built: Built) -> None:
    """The copy is what is looked up in every case."""


@case(on="hit", off="miss", module="both")
def cpp_and_cuda_units(root: Path, built: Built) -> None:
    (leaf,) = leaves_of(root, "both")
    assert [Path(e[1]).name for e in entries_of(leaf) if is_own(e)] == ["cuda.cu", "main.cpp"]


@case(on="hit", off="hit", scale=5)
def good_one_in_front(root: Path, built: Built) -> None:
    good_five(root, built)


@case(on="hit", off="hit", scale=5)
def good_one_among_100(root: Path, built: Built) -> None:
    behind(root, good_five(root, built), LIMIT - 3)


@case(on="hit", off="miss", scale=5)
def good_one_behind_101(root: Path, built: Built) -> None:
    behind(root, good_five(root, built), LIMIT - 1)


@case(on="hit", off="miss", scale=5)
def poisoned_one_behind_301(root: Path, built: Built) -> None:
    behind(root, leaves_of(root)[0], 3 * LIMIT - 1)


@case(on="miss", off="miss", scale=5)
def good_one_behind_100_good_ones(root: Path, built: Built) -> None:
    """As SGLang has it, because those would be in front without the fault as well."""
    good = good_five(root, built)
    for number in range(LIMIT):
        other = shutil.copytree(good, good.parent / "copy")
        rewrite(other, [*entries_of(good)[:-1], ("abs", f"/other{number}", "0" * 64)])
    behind(root, good, 50)


@case(on="miss", off="miss", scale=4)
def changed_header(root: Path, built: Built) -> None:
    pass


@case(on="miss", off="miss", scale=None)
def vanished_header(root: Path, built: Built) -> None:
    pass


@case(on="miss", off="miss", scale=4)
def changed_header_and_301_leaves(root: Path, built: Built) -> None:
    behind(root, leaves_of(root)[0], 3 * LIMIT)


@case(on="miss", off="miss")
def leaf_of_another_build(root: Path, built: Built) -> None:
    rename_unit(only(root), lambda unit: re.sub("/build-[0-9a-f]{16}/", f"/{OTHER}/", unit))


@case(on="miss", off="miss")
def not_the_name_of_a_unit(root: Path, built: Built) -> None:
    rename_unit(only(root), lambda unit: unit.replace("/main.cpp", "/mine.h"))


@case(on="miss", off="miss")
def not_the_name_of_a_staging_folder(root: Path, built: Built) -> None:
    rename_unit(only(root), lambda unit: unit.replace("/main.cpp", "0/main.cpp"))


@case(on="miss", off="miss")
def relative(root: Path, built: Built) -> None:
    rename_unit(only(root), lambda unit: unit.lstrip("/"))


@case(on="hit", off="hit")
def unit_that_exists(root: Path, built: Built) -> None:
    leaf = only(root)
    put_unit_back(leaf, (leaf / "main.cpp").read_text())


@case(on="miss", off="miss")
def unit_that_exists_and_differs(root: Path, built: Built) -> None:
    put_unit_back(only(root), "other")


@case(on="miss", off="miss")
def edited_digest(root: Path, built: Built) -> None:
    leaf = only(root)
    entries = [(e[0], e[1], "0" * 64) if is_own(e) else e for e in entries_of(leaf)]
    (leaf / "sgl_deps.json").write_text(json.dumps(entries))


@case(on="miss", off="miss")
def missing_entry(root: Path, built: Built) -> None:
    leaf = only(root)
    (leaf / "sgl_deps.json").write_text(json.dumps(entries_of(leaf)[:-1]))


@case(on="miss", off="miss")
def nothing_but_its_unit(root: Path, built: Built) -> None:
    leaf = only(root)
    rewrite(leaf, [entry for entry in entries_of(leaf) if is_own(entry)])


@case(on="miss", off="miss")
def no_library(root: Path, built: Built) -> None:
    (only(root) / "sgl_kernel_jit_one.so").unlink()


@case(on="miss", off="miss")
def garbage(root: Path, built: Built) -> None:
    (only(root) / "sgl_deps.json").write_bytes(b"\xff[[")


LOOK_UP = """
source, *cases = json.loads(sys.argv[1])
source = pathlib.Path(source)
print(json.dumps([load(root, name, source, scale) for root, name, scale in cases]))
"""


@pytest.fixture(scope="module")
def verdicts(
    built: Built, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, dict[str, str]]]:
    """What SGLang says of each case, by shim: all on one read-only mount, one process each."""
    folder = tmp_path_factory.mktemp("cases").resolve()
    asked: list[Any] = [str(built.source)]
    for name, case in CASES.items():
        case.prepare(built.copy(folder / name), built)
        asked.append((str(folder / name), case.module, case.scale))
    yield {
        shim: dict(
            zip(
                CASES,
                sglang(built, LOOK_UP, shim, json.dumps(asked), read_only=folder),
                strict=True,
            )
        )
        for shim in ("on", "off")
    }
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", CASES)
def test_verdict(verdicts: dict[str, dict[str, str]], name: str) -> None:
    found = {shim: verdicts[shim][name] for shim in ("on", "off")}
    assert found == {"on": CASES[name].on, "off": CASES[name].off}


IN_PLACE = """
root, source, *scopes = map(pathlib.Path, sys.argv[1:])

def files():
    return sorted((str(path), path.is_file() and path.read_bytes()) for path in root.rglob("*"))

before = files()
found = [load(root.parent / "link", "one", source, 3), load(root, "two", source, 3)]
# After the hit of "one", so in a process that knows the digest of its unit.
for scope in scopes:
    prebuilt = cache.find_prebuilt(scope=scope, module_name="sgl_kernel_jit_one")
    found.append("hit" if prebuilt else "miss")
assert files() == before
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("shim", "expected"),
    [("on", ["hit", "hit", "hit", "miss"]), ("off", ["miss"] * 4)],
)
def test_in_place(built: Built, tmp_path: Path, shim: str, expected: list[str]) -> None:
    """Where the link is, and then copied elsewhere, and to the folder of another build."""
    leaf = only(built.copy(tmp_path / "cache"))
    other = leaf.parent.with_name(OTHER)
    shutil.copytree(leaf.parent, other)
    folders = map(str, (built.poisoned, built.source, leaf.parent, other))
    assert sglang(built, IN_PLACE, shim, *folders) == expected
