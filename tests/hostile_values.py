"""Values nobody would type, checked against what SGLang and the kernel make of them.

    python tests/hostile_values.py [CASES]

Hypothesis puts values together from path parts, with homes and working directories to
match. For each, SGLang's own ``cache_root()`` and mkdir say which directory it would
use, and the kernel says what that directory's real path is; ``real_root`` must agree.
The cases run in a root directory of their own (chroot), so ``..`` and ``/`` do no harm:
needs root, or ``unshare --map-root-user``.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.kernels.jit.utils.compile.cache import cache_root

import sglang_jitfix

NAMES = [
    "real", "link", "two", "up", "dangling", "loop", "file", "absent", "deep/inner", "shut",
    ".", "..", "", " ", "~", "~root", "~nobody-at-all", "~link", "$HOME", "a\nb", "лін",
    os.fsdecode(b"\xff\xfe"), "n" * 255, "n" * 256, "p/" * 400, "q" * 200 + "/",
]  # fmt: skip
HOMES = [None, "", "/", "//", "/home/user", "/home/link", "link", "~", "/loop", "/absent", "."]
FOLDERS = ["/", "/here", "/here/link", "/home/user", "/here/deep/inner"]

values = st.builds(
    lambda start, names, end: start + "/".join(names) + end,
    st.sampled_from(["", "", "/", "//", "///", "./", "/here/", "~", "~/"]),
    st.lists(st.sampled_from(NAMES), max_size=6) | st.just(["d" * 200] * 21),
    st.sampled_from(["", "", "/", "/."]),
).filter(bool)

AGREED, LEFT_ALONE, NOT_MADE, DIFFER = range(4)


def lay_out() -> None:
    """An empty root directory becomes one with all that NAMES, HOMES and FOLDERS need."""
    for folder in ("/here/real/down", "/here/deep/inner", "/here/shut", "/home/user", "/etc"):
        os.makedirs(folder)
    for place in ("/", "/here", "/home/user", "/here/real"):
        for link, target in {
            "link": "/here/real/down",
            "two": "link",
            "up": "..",
            "dangling": "absent-target/below",
            "loop": "loop",
        }.items():
            os.symlink(target, os.path.join(place, link))
        Path(place, "file").touch()
    os.symlink("user", "/home/link")
    Path("/etc/passwd").write_text("root:x:0:0::/home/link:/bin/sh\n")


def tree() -> list[str]:
    """All that is in the root directory."""
    return sorted(f"{top}/{name}" for top, *names in os.walk("/") for name in chain(*names))


def check(value: str, home: str | None, folder: str, deleted: bool) -> int:
    """The outcome of one case; raises AssertionError where the shim and SGLang differ."""
    lay_out()
    if home is None:
        os.environ.pop("HOME", None)
    else:
        os.environ["HOME"] = home
    os.chdir(folder)
    if deleted:
        os.mkdir("gone")
        os.chdir("gone")
        os.rmdir("../gone")
    before = tree()
    os.environ[sglang_jitfix.ROOT] = value
    ours = sglang_jitfix.real_root(value)
    assert tree() == before, "the shim made something"
    theirs = None
    try:
        theirs = cache_root()
        theirs.mkdir(parents=True, exist_ok=True)
        os.chdir(theirs)
        expected = os.getcwd()
    except (OSError, RuntimeError):
        # Nothing to compare with; what the shim names must be what SGLang's path means.
        assert ours is None or (theirs and ours == os.path.realpath(theirs)), (ours, theirs)
        return NOT_MADE
    if ours is None:
        # Left alone, so SGLang goes on as it would. There are two reasons: a path too long,
        # and a deleted working directory, whose ".." is still there.
        assert deleted or len(os.fsencode(expected)) > 3000, (value, expected)
        return LEFT_ALONE
    assert ours == expected, (ours, theirs)
    assert sglang_jitfix.real_root(ours) == ours
    return AGREED


def empty() -> None:
    """Remove everything from the root directory."""
    os.chdir("/")
    for entry in os.scandir("/"):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def serve(cases: Connection) -> None:
    """Answer each case from *cases* with its outcome, in a root directory of this process's own."""
    with suppress(EOFError):
        while case := cases.recv():
            try:
                outcome = check(*case)
            except Exception:
                traceback.print_exc()
                outcome = DIFFER
            empty()
            cases.send(outcome)


@contextmanager
def jail() -> Iterator[Connection]:
    """A forked process that serves; hypothesis stays outside, with the files it imports late."""
    ours, theirs = Pipe()
    with tempfile.TemporaryDirectory() as folder:
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                os.chroot(folder)
                os.chdir("/")
                serve(theirs)
            finally:
                os._exit(0)
        theirs.close()
        try:
            yield ours
        finally:
            ours.close()
            os.waitpid(pid, 0)


def main() -> None:
    cases = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    seen: Counter[int] = Counter()
    with jail() as jailed:

        @settings(
            max_examples=cases,
            derandomize=cases <= 1000,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(values, st.sampled_from(HOMES), st.sampled_from(FOLDERS), st.integers(0, 9))
        def search(value: str, home: str | None, folder: str, die: int) -> None:
            jailed.send((value, home, folder, die == 0))
            outcome = jailed.recv()
            seen[outcome] += 1
            assert outcome != DIFFER

        search()
    print(f"{seen[AGREED]} agreed, {seen[LEFT_ALONE]} left alone, {seen[NOT_MADE]} not made")


if __name__ == "__main__":
    main()
