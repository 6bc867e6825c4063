"""Measures, by hand: ``python tests/benchmarks/cache_10k.py [FOLDER]``.

Time and peak memory of the commands on a cache of 10,000 leaves that no compiler made,
with manifests of 400 entries like those of real CUDA modules, half of them poisoned.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cachekit import Entry, own_unit, set_age, write_leaf, write_scope
from support import environment

SCOPES, LEAVES, ENTRIES = 1000, 10, 400


def make(root: Path) -> None:
    """1,000 scopes of 10 leaves: 5 good ones, and of two contents 5 poisoned ones."""
    for number in range(SCOPES):
        scope = write_scope(root, f"module_{number % 50}", f"{number:016x}")
        for leaf in range(LEAVES):
            poisoned = leaf % 2
            content = leaf % 4 if poisoned else 10 + leaf
            entries: list[Entry] = [
                ("sitepkgs", f"nvidia/cu13/include/cccl/header_{index:03}.h", digest(content))
                for index in range(ENTRIES - poisoned)
            ]
            made = write_leaf(scope, [own_unit(scope), *entries] if poisoned else entries)
            for name in ("cuda.cu", "cuda_0.o", "cuda_0.o.d", ".ninja_log"):
                (made / name).write_text("text")
            set_age(made, leaf)


def digest(content: object) -> str:
    return hashlib.sha256(repr(content).encode()).hexdigest()


def measure(*arguments: str) -> None:
    """Print the seconds and the peak memory of one command, in a process of its own."""
    # The peak of a child counts from its parent's at the fork, so a small one starts it.
    code = (
        "import resource, subprocess, sys\n"
        "assert subprocess.run(sys.argv[1:], stdout=-3).returncode in (0, 1)\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    command = [sys.executable, "-m", "sglang_jitfix", *arguments]
    start = time.perf_counter()
    out = subprocess.check_output([sys.executable, "-c", code, *command], env=environment())
    seconds = time.perf_counter() - start
    print(f"{' '.join(arguments[:-1]):20}{seconds:8.1f} s{int(out) / 1024:8.0f} MiB", flush=True)


def main() -> None:
    """Make the cache in a temporary folder, measure, and remove it."""
    where = sys.argv[1] if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory(dir=where) as name:
        root = Path(name).resolve() / "cache"
        print(f"making {SCOPES * LEAVES} leaves of {ENTRIES} entries", flush=True)
        make(root)
        for arguments in (
            ["ls"],
            ["repair", "--dry-run"],
            ["repair"],
            ["repair"],
            ["ls"],
        ):
            measure(*arguments, str(root))


if __name__ == "__main__":
    main()
