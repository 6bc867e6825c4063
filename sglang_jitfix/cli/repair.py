"""``sglang-jitfix repair``: poisoned leaves become the leaves SGLang would have written.

Each step is one rename in a scope whose lock is held, and a new leaf is there before the
old one goes. So a repair that is killed has lost no build, and the next one finds what
it left: temporary folders, and old leaves whose new one exists.

``--json`` prints one object: ``root``, ``dry_run``, the counts ``mended``, ``merged``,
``removed`` and ``left`` (poisoned leaves that are still there), ``freed_bytes``, and
``actions``, objects of ``target``, ``module``, ``build``, ``leaf``, ``action``, ``becomes``
(the leaf that replaces it) and ``reason``, the last two null where there is none.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import os
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_jitfix import leaves
from sglang_jitfix.cache import disk
from sglang_jitfix.cache.errors import CommandError
from sglang_jitfix.cli import output, plan
from sglang_jitfix.cli.plan import Step

LOCK_WAIT = 2.0  # seconds for a scope whose lock is taken
# What a file system says that has no hard links, or not of this file.
NO_LINKS = {errno.EPERM, errno.EMLINK, errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP}
# What no other scope will be spared either.
FATAL = {errno.ENOSPC, errno.EDQUOT, errno.EIO}


def run(arguments: argparse.Namespace) -> int:
    """Mend, print what was done, return 0 if nothing is left to mend, otherwise 1.

    2 if a folder could not be read or written. Raises CommandError: no such root, or
    read-only; OSError: a full disk.
    """
    cache = disk.Cache(disk.find_root(arguments.root))
    repair = Repair(cache, arguments.dry_run, arguments.staging_older_than)
    try:
        repair.run()
    finally:  # also what was done before a full disk ended it
        if arguments.json:
            output.show_json(repair.report())
        else:
            show(repair.report())
    return output.finish(cache.problems, int(repair.left > 0))


class Repair:
    """One run over a cache; what it did, or would do, is in ``done``."""

    def __init__(self, cache: disk.Cache, dry_run: bool, staging_age: int | None) -> None:
        self.cache = cache
        self.dry_run = dry_run
        self.staging_age = staging_age
        self.done: list[Step] = []
        self.freed = 0  # bytes
        self.suspects: set[Path] = set()  # the leaves to mend, whatever becomes of them

    def run(self) -> None:
        """Mend scope by scope.

        Raises OSError, or CommandError where the cache may not be written.
        """
        scopes = iter([*self.cache.scopes()])
        try:
            for scope in output.counted(scopes, "scopes"):
                # Without the lock: most scopes need nothing and are not touched.
                planned = self._plan(scope)
                self.done += [step for step in planned if step.action not in plan.WORK]
                work = [step for step in planned if step.action in plan.WORK]
                if self.dry_run:
                    self._count(work)
                elif work:
                    self._mend(scope)
        finally:
            for scope in scopes:  # what it did not come to is left to mend as well
                self._plan(scope)

    def _plan(self, scope: Path) -> list[Step]:
        left_overs = [path for path in self.cache.left_overs(scope) if self._is_litter(path)]
        found = [disk.examine(path) for path in self.cache.leaves(scope)]
        self.suspects.update(leaf.path for leaf in found if leaf.is_to_mend)
        return plan.steps(found, left_overs)

    def _count(self, steps: list[Step]) -> None:
        for step in steps:
            if step.action != plan.MENDED:
                self.freed += disk.size(step.path)
            self.done.append(step)

    def _mend(self, scope: Path) -> None:
        try:
            with locked(scope):
                for step in self._plan(scope):  # once more: it may have changed since
                    if step.action in plan.WORK:
                        size = disk.size(step.path)
                        carry_out(step)
                        self.freed += size if step.action != plan.MENDED else 0
                        self.done.append(step)
        except BlockingIOError:
            reason = "its lock is taken: a build is running"
            self.done.append(Step(scope / leaves.LOCK, plan.BUSY, "", reason))
        except OSError as error:
            if error.errno in FATAL:
                error.filename = error.filename or str(scope)
                raise
            if not scope.exists():  # pruned
                return
            problem = (
                f"cannot write {os.fspath(error.filename or scope)!a}: {error.strerror} (with the"
                " shim on, SGLang uses poisoned leaves where they are)"
            )
            if error.errno == errno.EROFS:
                raise CommandError(problem) from error
            # One user's leaf in a cache that many share must not keep all others waiting.
            self.cache.problems.append(problem)
            self.done.append(Step(scope / leaves.LOCK, plan.LEFT, "", str(error.strerror)))

    def _is_litter(self, path: Path) -> bool:
        if path.name.startswith(disk.OURS):  # whoever holds the lock: its repair has ended
            return True
        if self.staging_age is None or not leaves.STAGING.fullmatch(path.name):
            return False
        return time.time() - last_change(path) / 1e9 > self.staging_age

    @property
    def left(self) -> int:
        """How many leaves that need mending are still there."""
        return sum(map(os.path.lexists, self.suspects))

    def report(self) -> dict[str, Any]:
        """The JSON object that ``repair --json`` prints."""
        counts = Counter(step.action for step in self.done)
        return {
            "root": str(self.cache.root),
            "dry_run": self.dry_run,
            "mended": counts[plan.MENDED],
            "merged": counts[plan.MERGED],
            "removed": counts[plan.REMOVED],
            "left": self.left,
            "freed_bytes": self.freed,
            "actions": [
                {
                    **disk.place(step.path),
                    "action": step.action,
                    "becomes": step.becomes or None,
                    "reason": step.reason or None,
                }
                for step in self.done
            ],
        }


def show(report: dict[str, Any]) -> None:
    """Print *report* for people."""
    heads = ["target", "module", "build", "leaf", "action", "becomes"]
    rows = [
        [one[name] for name in heads[:-1]] + [one["becomes"] or one["reason"] or ""]
        for one in report["actions"]
    ]
    if rows:
        print(output.table(heads, rows))
    would = "would be " if report["dry_run"] else ""
    print(
        f"{output.plural(report['mended'], 'leaf', 'leaves')} {would}mended,"
        f" {report['merged']} {would}merged, {output.plural(report['removed'], 'left-over')}"
        f" {would}removed, {output.size(report['freed_bytes'])} {would}freed;"
        f" {report['left']} left to mend"
    )


@contextlib.contextmanager
def locked(scope: Path) -> Iterator[None]:
    """Hold SGLang's lock of *scope* (``_build_lock``, loader.py).

    Raises BlockingIOError if it is taken, or another OSError.
    """
    path = scope / leaves.LOCK
    # A link is not SGLang's: root must not make, or give away, what it leads to.
    flags = os.O_RDWR | os.O_NOFOLLOW
    try:
        handle = os.open(path, flags)
    except FileNotFoundError:
        handle = os.open(path, os.O_CREAT | flags, 0o644)
        give_to(scope.stat(), handle)
    try:
        deadline = time.monotonic() + LOCK_WAIT
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.05)
        yield
    finally:
        os.close(handle)  # releases the lock


def carry_out(step: Step) -> None:
    """Do *step*, while the lock of its scope is held; raises OSError."""
    new = step.path.parent / step.becomes
    if step.action == plan.MENDED:
        publish(disk.examine(step.path), new)
    elif step.action == plan.MERGED:
        newest = max(map(disk.modified, (new, step.path)))
        if newest > disk.modified(new):  # its content keeps its place in time
            os.utime(new, ns=(newest, newest))
    discard(step.path)


def publish(old: disk.Leaf, new: Path) -> None:
    """Make the good leaf *new* of the poisoned leaf *old*, complete or not at all.

    The lock of their scope is held. *new* does not exist or is half a leaf. Raises OSError.
    """
    staging = temporary(new.parent)
    staging.mkdir()
    try:
        for path in old.path.iterdir():
            if path.name != leaves.MANIFEST:
                copy(path, staging / path.name)
        manifest = staging / leaves.MANIFEST
        manifest.write_bytes(leaves.encode(old.good_entries))
        imitate(old.path / leaves.MANIFEST, manifest)
        imitate(old.path, staging)
        if os.path.lexists(new):
            discard(new)
        os.rename(staging, new)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def copy(path: Path, target: Path) -> None:
    """Let *target* be what *path* is: by a hard link if it can, for SGLang never changes a file
    of a leaf. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        raise OSError(errno.EISDIR, "a folder, as no leaf of SGLang's has", str(path))
    try:
        os.link(path, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        shutil.copyfile(path, target, follow_symlinks=False)
        imitate(path, target)


def imitate(model: Path, path: Path) -> None:
    """Give *path* the times, mode and, if it can, the owner of *model*."""
    give_to(model.lstat(), path)
    shutil.copystat(model, path, follow_symlinks=False)


def give_to(owner: os.stat_result, file: Path | int) -> None:
    """Let *file*, a path or a descriptor, belong to *owner* where this process may give it away."""
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):  # a file system or a container without that owner
            os.chown(file, owner.st_uid, owner.st_gid, follow_symlinks=isinstance(file, int))


def discard(path: Path) -> None:
    """Remove the folder at *path*, which disappears at once, or the file; raises OSError."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)  # pruned, or removed by another repair
        return
    rubbish = path
    if not path.name.startswith(disk.OURS):
        rubbish = temporary(path.parent)
        try:
            os.rename(path, rubbish)
        except FileNotFoundError:  # pruned
            return
    with contextlib.suppress(OSError):  # its owner may have made it read-only
        rubbish.chmod(0o700)
    try:
        shutil.rmtree(rubbish)
    except RecursionError:  # not SGLang's either
        raise OSError(errno.ENAMETOOLONG, "too many folders in each other", str(path)) from None


def temporary(scope: Path) -> Path:
    """A new name in *scope* that SGLang ignores and the next repair removes."""
    return scope / f"{disk.OURS}{uuid.uuid4().hex}"


def last_change(folder: Path) -> int:
    """When *folder* or a file in it was last modified, in nanoseconds."""
    try:
        with os.scandir(folder) as listing:
            files = [entry.stat(follow_symlinks=False).st_mtime_ns for entry in listing]
    except OSError:
        files = []
    return max([disk.modified(folder), *files])
