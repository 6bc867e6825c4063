"""A process that has imported SGLang and forks, on demand, workers that load one JIT module.

The import takes most of a new process's time. Forked before anything is loaded, a worker
knows as little of the cache as a new process. The start-up file has seen the variables
that the process itself was started with, not those that a worker is given: where it
matters, give a worker what a new interpreter `hands_down`.
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
from typing import Any, NoReturn

from sglang_jitfix import ROOT
from sglang_jitfix.cli import probe
from stack import FORBID
from support import environment, python


@dataclass(frozen=True)
class Answer:
    """The compiles of each worker and the seconds that its load took, and the seconds from the
    first fork until the last of them had its module."""

    compiles: list[int]
    loads: list[float]
    seconds: float


class Forker:
    """A process that imports SGLang once and then forks, of *script*.

    It is asked, and answers, in lines of JSON; its first answer is "ready".
    """

    def __init__(
        self,
        script: str,
        source: Path,
        env: Mapping[str, str],
        cwd: Path | None = None,
        executable: str | Path = sys.executable,
    ) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by end()
        self.process = subprocess.Popen(
            [executable, script, source],
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            start_new_session=True,  # so that what it forked can be ended with it
        )

    def ask(self, **request: object) -> None:
        """Send *request*; :meth:`answer` waits for what comes of it."""
        assert self.process.stdin is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        """The next answer; AssertionError, with its stderr, if the process has ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:  # SGLang may print to it as well
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        self.log.seek(0)
        raise AssertionError(self.log.read()[-4000:])

    def end(self) -> None:
        """Kill the process and whatever it has forked."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        self.log.close()


class Forks(Forker):
    """A running ``forks.py``."""

    def load(self, count: int, variables: Mapping[str, str], cwd: Path | str = ".") -> Answer:
        """Have *count* workers load the module at once, in *cwd*, with *variables* set.

        AssertionError, with the worker's error, if one fails.
        """
        self.ask(count=count, cwd=str(cwd), variables=dict(variables))
        outcomes, seconds = self.answer()
        assert [type(outcome) for outcome in outcomes] == [dict] * count, outcomes
        compiles, loads = ([each[name] for each in outcomes] for name in ("compiles", "seconds"))
        return Answer(compiles, loads, seconds)

    def hits(self, variables: Mapping[str, str], cwd: Path | str = ".") -> bool:
        """Whether a worker that may not compile, as at a restart, loads the module."""
        self.ask(count=1, cwd=str(cwd), variables={**variables, **FORBID})
        [outcome], _ = self.answer()
        if isinstance(outcome, str):
            assert "has no usable cached build" in outcome, outcome
            return False
        return bool(outcome["compiles"] == 0)


@contextmanager
def forks(source: Path, env: Mapping[str, str], cwd: Path | None = None) -> Iterator[Forks]:
    """Start the process, with the environment *env*, for the module whose C++ file is *source*."""
    running = Forks(__file__, source, env, cwd)
    try:
        assert running.answer() == "ready"
        yield running
    finally:
        running.end()


def hands_down(given: str, cwd: Path, **extra: str) -> dict[str, str]:
    """*extra*, and the cache root that an interpreter passes on to its children if it is started
    in *cwd* with *given* as its root and with *extra*."""
    code = f"import os, sys; sys.stdout.buffer.write(os.environb[b{ROOT!r}])"
    return {ROOT: python(code, env=environment(given, **extra), cwd=cwd), **extra}


def work(source: str, request: dict[str, Any], pipe: int) -> NoReturn:
    """Load once and write the probe's report, or the error's text, to *pipe* as a line of JSON."""
    outcome: dict[str, Any] | str = ""
    try:
        os.environ.update(request["variables"])
        os.chdir(request["cwd"])
        outcome = probe.load(source)
    except Exception as error:
        outcome = repr(error)[-2000:]  # so little is written to a pipe as one piece
    finally:
        os.write(pipe, json.dumps(outcome).encode() + b"\n")
        os._exit(0)


def answer(source: str, request: dict[str, Any]) -> tuple[list[dict[str, Any] | str], float]:
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
