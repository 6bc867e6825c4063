"""A process that has imported SGLang and forks, on demand, the workers of a restart.

Each line of stdin, ``COUNT ROOT``, forks COUNT workers at once that load the probe
module with ROOT as cache root ("-": as this process was started); the answer is one
line of JSON: compiles of all, and seconds until the last had its module. Forked before
anything is loaded, a worker knows as little of the cache as a new process.
"""

from __future__ import annotations

import json
import os
import sys
import time

from sglang.kernels.jit.utils.compile import load_jit  # noqa: F401

from sglang_jitfix import ROOT
from sglang_jitfix.cli import probe


def worker(source: str, root: str, pipe: int) -> None:
    """Load once and write the number of compiles to *pipe*; never returns."""
    status = 1
    try:
        if root != "-":
            os.environ[ROOT] = root
        os.write(pipe, b"%d\n" % probe.load(source)["compiles"])
        status = 0
    finally:
        os._exit(status)


def restart(source: str, count: int, root: str) -> dict[str, float]:
    """Fork *count* workers, wait for all of them, and say what they took."""
    reader, writer = os.pipe()
    start = time.perf_counter()
    children = []
    for _ in range(count):
        child = os.fork()
        if child == 0:
            worker(source, root, writer)
        children.append(child)
    os.close(writer)
    failed = [child for child in children if os.waitpid(child, 0)[1]]
    seconds = time.perf_counter() - start
    with os.fdopen(reader) as answers:
        compiles = sum(map(int, answers))
    if failed:
        raise RuntimeError(f"{len(failed)} workers failed")
    return {"compiles": compiles, "seconds": seconds}


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        count, root = line.rstrip("\n").split(" ", 1)
        print(json.dumps(restart(sys.argv[1], int(count), root)), flush=True)


if __name__ == "__main__":
    main()
