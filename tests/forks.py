"""A process that has imported SGLang and forks, on demand, workers that load one JIT module.

The import takes most of a new process's time. Forked before anything is loaded, a worker
knows as little of the cache as a new process. The start-up file has seen the variables
that the process itself was started with, not those that a worker is given.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from sglang_jitfix.cli import probe


@dataclass(frozen=True)
class Answer:
    """The compiles of each worker, and the seconds until the last of them had its module."""

    compiles: list[int]
    seconds: float


class Forks:
    """The other end of that process, as :func:`forks` starts it."""

    def __init__(self, process: subprocess.Popen[str], log: IO[str]) -> None:
        self.process = process
        self.log = log

    def load(self, count: int, variables: Mapping[str, str], cwd: Path | str = ".") -> Answer:
        """Have *count* workers load the module at once, in *cwd*, with *variables* set.

        AssertionError, with the worker's error, if one fails.
        """
        request = {"count": count, "cwd": str(cwd), "variables": dict(variables)}
        assert self.process.stdin is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        outcomes, seconds = self.read()
        assert [type(outcome) for outcome in outcomes] == [int] * count, outcomes
        return Answer(outcomes, seconds)

    def read(self) -> Any:
        """The next answer; SGLang may print to stdout as well."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        self.log.seek(0)
        raise AssertionError(f"the process that forks has ended: {self.log.read()}")


@contextmanager
def forks(source: Path, env: Mapping[str, str], cwd: Path | None = None) -> Iterator[Forks]:
    """Start the process, with the environment *env*, for the module whose C++ file is *source*."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, source],
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # so that its workers can be ended with it
        )
        try:
            both = Forks(process, log)
            both.read()
            yield both
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def work(source: str, request: dict[str, Any], pipe: int) -> NoReturn:
    """Load once and write the compiles, or the error's text, to *pipe* as one line of JSON."""
    outcome: int | str = ""
    try:
        os.environ.update(request["variables"])
        os.chdir(request["cwd"])
        outcome = probe.load(source)["compiles"]
    except Exception as error:
        outcome = repr(error)[-2000:]  # so little is written to a pipe as one piece
    finally:
        os.write(pipe, json.dumps(outcome).encode() + b"\n")
        os._exit(0)


def answer(source: str, request: dict[str, Any]) -> tuple[list[int | str], float]:
    """The outcomes of the workers of *request*, and the seconds they took together."""
    reader, writer = os.pipe()
    start = time.perf_counter()
    children = []
    for _ in range(request["count"]):
        child = os.fork()
        if child == 0:
            work(source, request, writer)
        children.append(child)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        outcomes = [json.loads(line) for line in pipe]
    for child in children:
        os.waitpid(child, 0)
    return outcomes, time.perf_counter() - start


def main() -> None:
    print('answer "ready"', flush=True)
    for line in sys.stdin:
        print("answer", json.dumps(answer(sys.argv[1], json.loads(line))), flush=True)


if __name__ == "__main__":
    import sglang.kernels.jit.utils.compile  # noqa: F401

    main()
