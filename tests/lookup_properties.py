"""Properties of look-ups, for a process that has loaded SGLang: test_lookup_properties starts it.

Manifests are written by SGLang's own writer, once as the fault makes it see its staging
folder and once as it should. With the shim, a poisoned leaf must get the verdict that
SGLang without the shim gives its good twin, whatever happens to the files.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.kernels.jit.utils.compile import cache

MODULE = "sgl_kernel_jit_m"
BUILD, OTHER_BUILD = "build-0123456789abcdef", "build-fedcba9876543210"
HEX = "0123456789abcdef" * 2
WRAPPED = ("_to_entries", "_read_deps", "_refresh", "find_prebuilt")
WORLD = Path(sys.argv[1]).resolve()
# A stand-in for SGLang's anchors, so that a cache below one of them can be tried.
ANCHOR = WORLD / "anchor"
cache._anchor_roots = lambda: (("kernels", ANCHOR),)

COMMON = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    max_examples=400,
)
number = itertools.count()

# What a dependency may be called: an ordinary header, or one where only a part looks
# like a generated unit.
PLACES = (
    "b c/ä\n.h",
    f"{BUILD}/.staging-{HEX}/user.h",
    f"{BUILD}/.staging-{HEX[1:]}/main.cpp",
    f"{BUILD}/.staging-{HEX.upper()}/cuda.cu",
    f"{BUILD}/staging-{HEX}/cuda.cu",
    f"{BUILD}/.staging-{HEX}/below/cuda.cu",
    f"{OTHER_BUILD}/.staging-{HEX}/cuda.cu",
    f"{BUILD}0/.staging-{HEX}/main.cpp",
)
FATES = st.sampled_from(("edited", "deleted", "same again"))


@contextlib.contextmanager
def no_shim() -> Iterator[None]:
    """SGLang's own functions meanwhile; nothing to take off where the shim is off."""
    patched = {name: getattr(cache, name) for name in WRAPPED}
    for name, function in patched.items():
        setattr(cache, name, getattr(function, "__wrapped__", function))
    try:
        yield
    finally:
        for name, function in patched.items():
            setattr(cache, name, function)


def look_up(scope: Path) -> str | None:
    """The text of the library that is found in *scope* by a process that knows nothing yet."""
    cache.clear_digest_cache()
    found = cache.find_prebuilt(scope=scope, module_name=MODULE)
    return None if found is None else found.read_text()


class Example:
    """One build: sources, a poisoned manifest and a good one, each by SGLang's own writer."""

    def __init__(self, places: Sequence[str], units: Sequence[str], anchored: bool) -> None:
        folder = (ANCHOR if anchored else WORLD) / str(next(number))
        self.files = [folder / "include" / place for place in ("a.h", *places)]
        self.scope = folder / "real" / "sm86" / MODULE / BUILD
        self.twin = folder / "twin" / "sm86" / MODULE / BUILD
        self.other = self.scope.with_name(OTHER_BUILD)
        for scope in (self.scope, self.twin, self.other):
            scope.mkdir(parents=True)
        (folder / "link").symlink_to(folder / "real")
        self.staging = self.scope / f".staging-{HEX}"
        self.units = [self.staging / unit for unit in units]
        for path in (*self.files, *self.units):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"text of {path.name}")
        dependencies = [*self.files, *(Path(unit) for unit in units)]
        linked = folder / "link" / "sm86" / MODULE / BUILD / self.staging.name
        cache.clear_digest_cache()
        with no_shim():
            self.poisoned = cache._to_entries(dependencies=dependencies, build_dir=linked)
            self.good = cache._to_entries(dependencies=dependencies, build_dir=self.staging)
        assert len(self.poisoned) == len(self.good) + len(units)
        shutil.rmtree(self.staging)

    def is_unit(self, entry: Any) -> bool:
        return entry not in self.good


def write(scope: Path, entries: Sequence[Any], text: str, listed: Sequence[Any] | None) -> Path:
    """A leaf named after *entries*, whose manifest holds *listed* if that is given."""
    leaf = scope / f"deps-{cache._deps_key(entries)}"
    leaf.mkdir(exist_ok=True)
    (leaf / f"{MODULE}.so").write_text(text)
    manifest = msgspec.json.encode(entries if listed is None else listed)
    (leaf / "sgl_deps.json").write_bytes(manifest)
    return leaf


def meet(path: Path, fate: str) -> None:
    """Let what *fate* says happen to the file at *path*."""
    if fate == "edited":
        path.write_text("edited")
    elif fate == "deleted":
        path.unlink()
    elif fate == "same again":
        text = path.read_text()
        path.unlink()
        path.write_text(text)


EXAMPLES = st.builds(
    Example,
    st.lists(st.sampled_from(PLACES), max_size=3, unique=True),
    st.sampled_from((("main.cpp",), ("cuda.cu",), ("main.cpp", "cuda.cu"))),
    st.booleans(),
)


@COMMON
@given(EXAMPLES, st.dictionaries(st.integers(0, 3), FATES, max_size=2))
def files_change(example: Example, fates: dict[int, str]) -> None:
    """A poisoned leaf gets its twin's verdict, in place and moved; a good leaf keeps its own."""
    write(example.scope, example.poisoned, "built", None)
    write(example.twin, example.good, "built", None)
    write(example.other, example.poisoned, "built", None)
    fates = {index: fate for index, fate in fates.items() if index < len(example.files)}
    for index, fate in fates.items():
        meet(example.files[index], fate)
    moved = example.twin.parents[3] / "moved" / BUILD
    shutil.copytree(example.scope, moved)
    with no_shim():
        expected = look_up(example.twin)
        assert look_up(example.scope) is None, "the fault is not there"
    changed = not {"edited", "deleted"}.isdisjoint(fates.values())
    assert expected == (None if changed else "built")
    assert look_up(example.scope) == expected, "the poisoned leaf"
    assert look_up(moved) == expected, "the poisoned leaf, moved"
    assert look_up(example.twin) == expected, "the good leaf"
    # In a process that has just used the leaf, and in one that has not.
    look_up(example.scope)
    assert cache.find_prebuilt(scope=example.other, module_name=MODULE) is None, "copied"
    assert look_up(example.other) is None, "copied"


@COMMON
@given(EXAMPLES, st.lists(st.sampled_from(("same", "other", "gone")), min_size=2, max_size=2))
def units_exist(example: Example, states: list[str]) -> None:
    """Where a unit exists SGLang hashes it; only where all are gone or the same it is a hit."""
    write(example.scope, example.poisoned, "built", None)
    states = states[: len(example.units)]
    for path, state in zip(example.units, states, strict=True):
        if state != "gone":
            path.parent.mkdir(exist_ok=True)
            path.write_text(f"text of {path.name}" if state == "same" else "other")
    assert look_up(example.scope) == (None if "other" in states else "built")


@COMMON
@given(EXAMPLES, st.data())
def manifest_is_edited(example: Example, data: Any) -> None:
    """An edited list gets the verdict of the good list edited the same way; if the edit
    concerns a unit, it is a miss, as the name no longer fits."""
    entry = data.draw(st.sampled_from(example.poisoned))
    edit = data.draw(st.sampled_from(("drop", "digest", "path", "repeat", "first")))

    def edited(entries: Sequence[Any]) -> list[Any]:
        others = [one for one in entries if one != entry]
        if edit == "drop":
            return others
        if edit == "first":
            return [entry, *others]
        if edit == "repeat":
            return [*entries, entry]
        change = {"digest": "0" * 64} if edit == "digest" else {"relpath": entry.relpath + "x"}
        new = msgspec.structs.replace(entry, **change)
        return [new if one == entry else one for one in entries]

    write(example.scope, example.poisoned, "built", edited(example.poisoned))
    write(example.twin, example.good, "built", edited(example.good))
    if example.is_unit(entry):
        same = edited(example.poisoned) == example.poisoned
        expected = "built" if same else None
    else:
        with no_shim():
            expected = look_up(example.twin)
        if edit == "first" and edited(example.poisoned) != example.poisoned:
            expected = None  # before the units, it is not first in their list
    assert look_up(example.scope) == expected


@COMMON
@given(
    st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=14),
    st.integers(0, 4),
)
def many_leaves(leaves: list[tuple[int, bool]], current: int) -> None:
    """With a limit of three, more is found than in the same cache without the fault, never
    less, and never another content than the current one."""
    example = Example([], ["main.cpp"], False)
    contents = []
    for content in range(5):
        example.files[0].write_text(str(content))
        cache.clear_digest_cache()
        contents.append(cache._to_entries(dependencies=example.files, build_dir=example.staging))
    for age, (content, poisoned) in enumerate(leaves):
        entries = contents[content]
        if poisoned:
            (unit,) = (entry for entry in example.poisoned if example.is_unit(entry))
            path = unit.relpath.replace(HEX, f"{age:032x}")
            entries = sorted(
                [*entries, msgspec.structs.replace(unit, relpath=path)],
                key=lambda entry: (entry.root, entry.relpath),
            )
        stamp = 10**9 - age
        for scope, listed in ((example.scope, entries), (example.twin, contents[content])):
            leaf = scope / f"deps-{cache._deps_key(listed)}"
            if not leaf.exists():
                write(scope, listed, str(content), None)
                os.utime(leaf, (stamp, stamp))
    example.files[0].write_text(str(current))
    cache._MAX_LEAVES_SCANNED = 3
    try:
        found = look_up(example.scope)
        with no_shim():
            expected = look_up(example.twin)
    finally:
        cache._MAX_LEAVES_SCANNED = 100
    assert found in (None, str(current)), "a stale kernel"
    assert expected is None or found == expected, "hidden"


if __name__ == "__main__":
    for name in sys.argv[2:]:
        try:
            globals()[name]()
        except Exception:
            traceback.print_exc()
            print("fails:", name)
        else:
            print("holds:", name)
