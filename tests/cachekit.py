"""What the tests of poisoned caches share: real ones, and many that the tests write themselves."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support import environment, python

Entry = tuple[str, str, str]

NOW = time.time()

SOURCE = """\
#include <cstdint>
#include <tvm/ffi/tvm_ffi.h>
#include "scale.h"

inline int64_t scale_cpp(int64_t x) { return x * SCALE; }
"""
CUDA_SOURCE = """\
#include <cstdint>

inline int64_t scale_cuda(int64_t x) { return x; }
"""

# One process stands for several: SGLang's clear_digest_cache() makes it forget what a
# fresh process does not know. load() says "built", "hit", or, where
# SGLANG_CRASH_ON_JIT_COMPILE forbids to build, "miss".
LOADER = """
import json, os, pathlib, shutil, sys
from sglang.kernels.jit.utils.arch import override_jit_cuda_arch
from sglang.kernels.jit.utils.compile import cache, load_jit, ninja

verdict, build = "", ninja.build

def counted(**arguments):
    global verdict
    verdict = "built"
    return build(**arguments)

ninja.build = counted

def load(root, name, source, scale):
    global verdict
    verdict = "hit"
    cache.clear_digest_cache()
    os.environ["SGLANG_JIT_CACHE_DIR"] = str(root)
    header, text = source / "scale.h", scale and f"#define SCALE {scale}\\n"
    if scale is None:
        header.unlink()
    elif not header.exists() or header.read_text() != text:
        header.write_text(text)
    cuda = {"cuda_files": [f"{source}/scale.cuh"], "cuda_wrappers": [("scale_cu", "scale_cuda")]}
    try:
        with override_jit_cuda_arch(8, 6):
            module = load_jit(
                name,
                cpp_files=[f"{source}/scale_cpp.h"],
                cpp_wrappers=[("scale", "scale_cpp")],
                **(cuda if name == "both" else {}),
            )
    except RuntimeError as error:
        assert "has no usable cached build" in str(error)
        return "miss"
    assert module.scale(2) == 2 * scale, "a stale kernel"
    return verdict
"""

BUILD = """
root, source = map(pathlib.Path, sys.argv[1:])
print([load(root / link, name, source, scale) for link, name, scale in (
    ("link", "one", 3), ("link", "one", 3), ("link", "one", 5), ("link", "two", 3),
    ("link", "both", 3), ("good", "one", 5),
)])
"""


@dataclass(frozen=True)
class Built:
    """Roots that the real SGLang filled with the shim off, and the sources of their modules."""

    poisoned: Path  # one, built with 3, 3 and 5; two; both, of C++ and CUDA
    good: Path  # one, built with 5
    source: Path

    def copy(self, folder: Path, root: Path | None = None) -> Path:
        """A copy of the poisoned root, or of *root*, at *folder*; times are kept."""
        return shutil.copytree(root or self.poisoned, folder)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Made once for all workers of one run; nothing below it is changed but scale.h."""
    worker = tmp_path_factory.getbasetemp()
    shared = worker.parent if "PYTEST_XDIST_WORKER" in os.environ else worker
    folder = shared.resolve() / "built"
    made = Built(folder / "real", folder / "good", folder / "source")
    with open(shared / "built.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            for path in (made.poisoned, made.good, made.source):
                path.mkdir(parents=True)
            (folder / "link").symlink_to(made.poisoned)
            (made.source / "scale_cpp.h").write_text(SOURCE)
            (made.source / "scale.cuh").write_text(CUDA_SOURCE)
            env = environment(None, "off", CUDA_HOME=cuda_home())
            out = python(LOADER + BUILD, str(folder), str(made.source), env=env)
            assert out.splitlines()[-1] == str(["built"] * 6)
            (folder / "done").touch()
    return made


def cuda_home() -> str:
    """The toolkit's real root, from which SGLang derives its library folder."""
    return os.environ.get("CUDA_HOME") or str(Path("/usr/local/cuda").resolve())


def sglang(built: Built, code: str, shim: str, *args: str, read_only: Path | None = None) -> Any:
    """What *code*, which follows LOADER, prints last, as JSON; nothing may be built in it."""
    env = environment(None, shim, CUDA_HOME=cuda_home(), SGLANG_CRASH_ON_JIT_COMPILE="1")
    mount = mounted_read_only(read_only) if read_only else [sys.executable]
    with open(built.source / "lock", "w") as lock:  # scale.h is one for all
        fcntl.flock(lock, fcntl.LOCK_EX)
        out = python(LOADER + code, *args, env=env, executable=mount[0], options=tuple(mount[1:]))
    return json.loads(out.splitlines()[-1])


def mounted_read_only(folder: Path) -> list[str]:
    """The start of a command, the interpreter its last word, to which *folder* is read-only."""
    script = (
        'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0"'
        ' && ! touch "$0/written" 2>/dev/null && exec "$@"'
    )
    options = "-m" if os.geteuid() == 0 else "-rm"
    return ["unshare", options, "sh", "-c", script, str(folder), sys.executable]


# Only root can read the interpreter or reach pytest's folders, so first all is loaded
# and the folder entered. The command's arguments follow "-m sglang_jitfix".
DROP_ROOT = """
import os, sys
from sglang_jitfix.cli.main import main
os.chdir({!r})
if os.geteuid() == 0:
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
sys.exit(main(sys.argv[3:]))
"""


def unprivileged(folder: Path) -> list[str]:
    """The start of a command that runs in *folder* and whom its modes bind."""
    folder.chmod(0o755)
    return [sys.executable, "-c", DROP_ROOT.format(str(folder))]


def key(entries: Sequence[Entry]) -> str:
    """SGLang's ``_deps_key``, written once more so that the tests do not lean on ours."""
    parts = b"".join(repr(tuple(entry)).encode() + b"\0" for entry in entries)
    return hashlib.sha256(parts).hexdigest()[:16]


def write_leaf(
    scope: Path, entries: Sequence[Entry], age: float = 0, name: str | None = None
) -> Path:
    """A leaf that no compiler made, as SGLang lays it out; *age* in seconds."""
    leaf = scope / (name or f"deps-{key(entries)}")
    leaf.mkdir(parents=True)
    (leaf / "sgl_deps.json").write_bytes(msgspec.json.encode(list(entries)))
    (leaf / f"{scope.parent.name}.so").write_text(f"library of {leaf.name}")
    (leaf / "build.ninja").write_text("ninja")
    set_age(leaf, age)
    return leaf


def set_age(path: Path, age: float) -> None:
    """Let *path* have been modified *age* seconds before a fixed moment of this run."""
    os.utime(path, (NOW - age, NOW - age))


def own_unit(scope: Path, unit: str = "cuda.cu") -> Entry:
    """The entry that poisons a leaf of *scope*: its unit in a staging folder that is gone."""
    path = scope / f".staging-{uuid.uuid4().hex}" / unit
    return ("abs", str(path), hashlib.sha256(unit.encode()).hexdigest())


def entries_of(leaf: Path) -> list[Entry]:
    """What the manifest of *leaf* lists."""
    decoded: list[Entry] = msgspec.json.decode(
        (leaf / "sgl_deps.json").read_bytes(), type=list[Entry]
    )
    return decoded


def is_own(entry: Entry) -> bool:
    """Whether *entry* is a unit in a staging folder, in a cache where nothing else is."""
    return "/.staging-" in entry[1]


def rewrite(leaf: Path, entries: Sequence[Entry]) -> Path:
    """Let *leaf* list *entries* and be named after them."""
    (leaf / "sgl_deps.json").write_bytes(msgspec.json.encode(list(entries)))
    return leaf.rename(leaf.parent / f"deps-{key(entries)}")


def poison(leaf: Path, age: float, unit: str = "main.cpp") -> Path:
    """Another poisoned copy of the real or made-up *leaf*, as one more process adds it."""
    good = [entry for entry in entries_of(leaf) if not is_own(entry)]
    copy = shutil.copytree(leaf, leaf.parent / "copy")
    copy = rewrite(copy, sorted([*good, own_unit(leaf.parent, unit)]))
    set_age(copy, age)
    return copy


DEPENDENCIES: list[Entry] = [
    ("abs", "/include/ä \n.h", "1" * 64),
    ("kernels", "include/sgl_kernel/utils.h", "2" * 64),
    ("sys", "include/stdio.h", "3" * 64),
]


def write_scope(root: Path, module: str = "m", build: str = "0123456789abcdef") -> Path:
    """An empty scope."""
    scope = root / "sm90a" / f"sgl_kernel_jit_{module}" / f"build-{build}"
    scope.mkdir(parents=True)
    return scope


def write_poisoned(scope: Path, age: float = 0, entries: Sequence[Entry] = DEPENDENCIES) -> Path:
    """A poisoned leaf that no compiler made."""
    return write_leaf(scope, sorted([*entries, own_unit(scope)]), age)


def snapshot(folder: Path) -> dict[str, Any]:
    """All there is below *folder*: modes and times, and the bytes of files."""
    return {
        str(path.relative_to(folder)): (
            path.lstat().st_mode,
            path.lstat().st_mtime_ns,
            path.read_bytes() if path.is_file() else None,
        )
        for path in folder.rglob("*")
    }


def jitfix(*arguments: str | Path, prefix: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """The command in a fresh process, which says at most one line on stderr and no traceback."""
    start = prefix or [sys.executable]
    done = subprocess.run(
        [*start, "-m", "sglang_jitfix", *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stderr.count("\n") <= 1, done.stderr
    return done
