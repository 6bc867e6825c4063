"""Import SGLang once, then fork storms of processes that load one JIT module: test_storms.py.

``python storm.py SOURCE``. Each line of stdin is a JSON object: ``processes``, ``trouble``
(a name below), ``real`` (the real cache root) and ``board`` (an empty folder, through which
the processes see how far each of them is). It is answered by a line of stdout that starts
with ``answer ``: how the processes ended, and how many builds they began.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar
from unittest import mock

import psutil
from sglang.kernels.jit.utils.compile import load_jit, ninja

T = TypeVar("T")


class Storm:
    """What the processes of one storm share."""

    def __init__(self, processes: int, trouble: str, real: str, board: str) -> None:
        self.processes = processes
        self.trouble = trouble
        self.real = Path(real)
        self.board = Path(board)
        self.disk = os.path.ismount(real)

    def mark(self, event: str, text: str = "") -> None:
        """Say that *event* has happened in this process."""
        (self.board / f"{event}.{os.getpid()}").write_text(text)

    def pids(self, event: str) -> set[int]:
        """The processes in which *event* has happened."""
        return {int(path.suffix[1:]) for path in self.board.glob(f"{event}.*")}

    def wait_for(self, event: str, count: int) -> None:
        """Wait until *event* has happened in *count* processes."""
        self.wait(lambda: len(self.pids(event)) >= count, f"{event} in {count} processes")

    def wait(self, condition: Callable[[], T], name: str) -> T:
        """What *condition* returns once that is true; TimeoutError says *name*."""
        end = time.monotonic() + 300
        while not (found := condition()):
            if time.monotonic() > end:
                raise TimeoutError(f"waited 300 s for: {name}")
            time.sleep(0.01)
        return found


Point = Callable[[Storm, int], None]


def nothing(storm: Storm, number: int) -> None:
    pass


def no_locks_left(storm: Storm, number: int) -> None:
    """A stand-in for a file system without flock, such as NFS whose lock daemon is down."""
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def remove_root(storm: Storm, number: int) -> None:
    """Only the first one that builds removes it."""
    if len(storm.pids("build")) == 1:
        shutil.rmtree(storm.real)


def other_group_builds(storm: Storm, number: int) -> None:
    """Both groups begin to build before either has finished."""
    storm.mark(f"group{number % 2}")
    for group in range(2):
        storm.wait_for(f"group{group}", 1)


def fill_disk(storm: Storm, left: int) -> None:
    """Leave *left* bytes on the disk that is mounted on the root.

    Without one (mounting takes root) a limit on the size of files stands in for it,
    which ends writes with EFBIG instead of ENOSPC.
    """
    if not storm.disk:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (left, hard))
        return
    with open(storm.real / "filler", "ab", buffering=0) as filler:
        with contextlib.suppress(OSError):
            while filler.write(bytes(4096)):
                pass
        filler.truncate(filler.tell() - left)


# What goes wrong, and at which point of SGLang's loader: in flock, before the build (the
# lock is held), after it (the library is loaded next), before the manifest is written.
TROUBLES: dict[str, dict[str, Point]] = {
    "none": {},
    "kill": {},
    "two groups": {"before build": other_group_builds},
    "no locks": {"lock": no_locks_left},
    # The generated unit and build.ninja still fit in.
    "disk full for the compiler": {"before build": lambda storm, _: fill_disk(storm, 16384)},
    "disk full for the manifest": {"before manifest": lambda storm, _: fill_disk(storm, 0)},
    "root removed before the build": {"before build": remove_root},
    "root removed before the library is loaded": {"after build": remove_root},
    "root removed before the manifest": {"before manifest": remove_root},
}


def instrument(storm: Storm, number: int) -> None:
    """Have SGLang's loader come past the storm's points in this process."""
    points = TROUBLES[storm.trouble]
    flock, build, scan = fcntl.flock, ninja.build, ninja.scan_dependencies

    def reach(point: str) -> None:
        points.get(point, nothing)(storm, number)

    def marked_flock(handle: int, operation: int) -> None:
        storm.mark("lock")
        reach("lock")
        if storm.trouble == "two groups" and number % 2:
            # As on NFS: this group's lock is another file, held until the process ends.
            handle = os.open(storm.board / "other-lock", os.O_CREAT | os.O_RDWR)
        flock(handle, operation)

    def marked_build(**arguments: Any) -> Any:
        storm.mark("build")
        # All have looked into the cold root in vain before the first one builds.
        storm.wait_for("lock", storm.processes)
        reach("before build")
        library = build(**arguments)
        reach("after build")
        return library

    def marked_scan(folder: Path) -> Any:
        dependencies = scan(folder)
        reach("before manifest")
        return dependencies

    mock.patch.object(fcntl, "flock", marked_flock).start()
    mock.patch.object(ninja, "build", marked_build).start()
    mock.patch.object(ninja, "scan_dependencies", marked_scan).start()


def child(storm: Storm, number: int, source: str) -> NoReturn:
    """Load the module and leave the outcome on the board."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    log = ""
    try:
        instrument(storm, number)
        module = load_jit("storm", cpp_files=[source], cpp_wrappers=[("add_one", "add_one")])
        outcome = str(module.add_one(41))
    except BaseException as error:
        code = getattr(error, "errno", None)
        outcome = type(error).__name__ + (f" {errno.errorcode[code]}" if code else "")
        log = traceback.format_exc()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    print(log, file=sys.stderr, end="", flush=True)
    storm.mark("outcome", outcome)
    os._exit(0)


def kill_a_third(storm: Storm) -> None:
    """In each of up to three rounds the one that builds, its compiler running, and others that
    wait for its lock."""
    third = storm.processes // 3
    rounds = min(third, 3)
    killed: set[int] = set()

    def builder() -> psutil.Process | None:
        for pid in storm.pids("build") - killed:
            process = psutil.Process(pid)
            if len(process.children(recursive=True)) > 1:  # ninja and the compiler
                return process
        return None

    for _ in range(rounds):
        holder = storm.wait(builder, "a compiler")
        assert holder is not None
        compilers = holder.children(recursive=True)
        waiting = storm.pids("lock") - killed - {holder.pid}
        for pid in [*sorted(waiting)[: third // rounds - 1], holder.pid]:
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        for compiler in compilers:  # they would run on, and nobody would see their end
            with contextlib.suppress(psutil.NoSuchProcess):
                compiler.kill()


def run(storm: Storm, source: str) -> dict[str, Any]:
    """Fork the storm's processes and wait for all of them."""
    # None of them has loaded a module yet, so none inherits digests that would hide the
    # fault. Eight that share no import are in test_builds.py.
    running = []
    outcomes: Counter[str] = Counter()
    try:
        for number in range(storm.processes):
            pid = os.fork()
            if not pid:
                child(storm, number, source)
            running.append(pid)
        if storm.trouble == "kill":
            kill_a_third(storm)
        while running:
            status = os.waitstatus_to_exitcode(os.waitpid(running[-1], 0)[1])
            pid = running.pop()
            killed = status == -signal.SIGKILL
            outcomes["killed" if killed else (storm.board / f"outcome.{pid}").read_text()] += 1
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return {"outcomes": outcomes, "builds": len(storm.pids("build"))}


def main() -> None:
    print("answer", json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print("answer", json.dumps(run(Storm(**json.loads(line)), sys.argv[1])), flush=True)


if __name__ == "__main__":
    main()
