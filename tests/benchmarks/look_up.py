"""Times SGLang's look-up with the shim and without, alternately, in one process.

``python look_up.py FOLDER ROUNDS ENTRIES``, with the shim on. Looked up is a manifest of
ENTRIES real headers, written into FOLDER as a good leaf and as a poisoned one. "Cold" is
the first look-up of a process, which digests each header, "warm" a later one. The last
line of stdout is a JSON object: seconds of each round, by kind and case.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path

import torch
from sglang.kernels.jit.utils.compile import cache

sys.path.insert(0, str(Path(__file__).parents[1]))

from cachekit import own_unit, write_leaf, write_scope

NAMES = ("_read_deps", "_refresh", "find_prebuilt")


def main(folder: Path, rounds: int, count: int) -> None:
    shim = {name: getattr(cache, name) for name in NAMES}
    plain = {name: function.__wrapped__ for name, function in shim.items()}
    headers = sorted(Path(torch.__file__).parent.rglob("include/ATen/**/*.h"))[:count]
    found = cache._to_entries(dependencies=headers, build_dir=folder)
    entries = [(entry.root, entry.relpath, entry.digest) for entry in found]
    assert len(entries) == count
    good, poisoned = (write_scope(folder / name) for name in ("good", "poisoned"))
    write_leaf(good, entries)
    write_leaf(poisoned, sorted([*entries[1:], own_unit(poisoned)]))
    # Without the shim a poisoned leaf is a miss: nothing to time.
    cases = {
        "good leaf, without": (plain, good),
        "good leaf, with": (shim, good),
        "poisoned leaf, with": (shim, poisoned),
    }

    def look_up(name: str, warm: bool) -> float:
        functions, scope = cases[name]
        for function in NAMES:
            setattr(cache, function, functions[function])
        if not warm:
            cache.clear_digest_cache()
        start = time.perf_counter()
        leaf = cache.find_prebuilt(scope=scope, module_name=scope.parent.name)
        seconds = time.perf_counter() - start
        assert leaf is not None
        return seconds

    gc.disable()
    times: dict[str, dict[str, list[float]]] = {}
    for kind, warm in (("cold", False), ("warm", True)):
        times[kind] = {name: [] for name in cases}
        for number in range(rounds):
            for name in list(cases)[:: 1 if number % 2 else -1]:
                times[kind][name].append(look_up(name, warm))
    print(json.dumps(times))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
