"""``sglang-jitfix repair``: poisoned leaves become the leaves SGLang would have written.

Each step is one rename in a scope whose lock is held, and all new leaves are there
before the first old one goes. So a repair that is killed has lost no build, and the
next one finds what it left: temporary folders, and old leaves whose new one exists.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sglang_jitfix import leaves
from sglang_jitfix.cli import caches, ls, output
from sglang_jitfix.cli.errors import CommandError

LOCK_WAIT = 2.0  # seconds for a scope whose lock is taken
# Seconds between the last new leaf and the first removal: look-ups take no lock, and
# one that began before the new leaf was there must not lose the old one under its feet.
GRACE = 1.0
AGE_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
# What a file system says that has no hard links, or not of this file.
NO_LINKS = {errno.EPERM, errno.EMLINK, errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP}

MENDED, MERGED, REMOVED, LEFT, BUSY = "mended", "merged", "removed", "left alone", "in use"


def add_parser(commands: Any) -> None:
    """Add this command to *commands*, argparse's sub-parsers."""
    parser = commands.add_parser(
        "repair",
        help="mend the poisoned builds in a cache, for SGLang without the shim too",
        description="Rewrites each poisoned leaf into the leaf that SGLang should have written."
        " Holds SGLang's lock of the scope meanwhile, so servers may run. Exit status 0 if"
        " nothing is left to mend, 1 if something is. Imports neither SGLang nor torch.",
    )
    parser.add_argument("root", nargs="?", metavar="ROOT", help="default: SGLang's own")
    parser.add_argument("--dry-run", action="store_true", help="show it only, change nothing")
    parser.add_argument(
        "--staging-older-than",
        type=seconds,
        metavar="AGE",
        help="also remove staging left-overs older than this, e.g. 90s, 30m, 1h, 2d",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def seconds(text: str) -> int:
    """An age such as ``1h`` in seconds; raises ArgumentTypeError for anything else."""
    match = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"not an age such as 90s, 30m, 1h or 2d: {text!a}")
    return int(match[1]) * AGE_UNITS[match[2]]


def run(arguments: argparse.Namespace) -> int:
    """Mend, print what was done, return 0 if nothing is left to mend, otherwise 1.

    2 if a folder could not be read. Raises CommandError: no such root, or read-only.
    """
    cache = caches.Cache(caches.find_root(arguments.root))
    repair = Repair(cache, arguments.dry_run, arguments.staging_older_than)
    try:
        repair.run()
    finally:  # also what was done before a full disk ended it
        if arguments.json:
            print(json.dumps(repair.report(), indent=2))
        else:
            repair.show()
    for problem in cache.problems:
        output.say(f"sglang-jitfix: {problem}")
    return 2 if cache.problems else int(repair.left > 0)


class LockTakenError(Exception):
    """A scope whose lock is taken."""


@dataclass(frozen=True)
class Action:
    """What became of the leaf or left-over at *path*; *becomes* is the leaf that replaces it."""

    path: Path
    action: str
    becomes: str = ""
    reason: str = ""


class Repair:
    """One run over a cache; what it did, or would do, is in ``actions``."""

    def __init__(self, cache: caches.Cache, dry_run: bool, staging_age: int | None) -> None:
        self.cache = cache
        self.dry_run = dry_run
        self.staging_age = staging_age
        self.actions: list[Action] = []
        self.freed = 0  # bytes
        self.replaced: dict[Path, list[Action]] = {}  # by scope, for the second pass

    def run(self) -> None:
        """Add all new leaves, then remove the old ones.

        Raises OSError, or CommandError where the cache may not be written.
        """
        for scope in output.counted(self.cache.scopes(), "scopes"):
            self._first_pass(scope)
        if self.replaced and not self.dry_run:
            self._make_durable()
            time.sleep(GRACE)
            for scope in output.counted(self.replaced, "scopes tidied"):
                self._in_scope(scope, partial(self._remove_replaced, scope))

    def _first_pass(self, scope: Path) -> None:
        # Without the lock: most scopes need nothing and are not touched.
        suspects = []
        for path in self.cache.leaves(scope):
            leaf = caches.examine(path)
            if leaf.status == caches.POISONED:
                suspects.append(path)
            elif leaf.status != caches.OK:
                # A list that names its unit but does not prove that the rule of
                # names is understood is one that a person has to look at.
                unproven = leaf.own and leaf.status == caches.UNREADABLE
                self._note(path, LEFT if unproven else leaf.status, reason=leaf.reason)
        litter = [path for path in self.cache.left_overs(scope) if self._is_litter(path)]
        if suspects or litter:
            self._in_scope(scope, partial(self._add_new, scope, suspects, litter))

    def _in_scope(self, scope: Path, work: Callable[[], None]) -> None:
        try:
            with contextlib.nullcontext() if self.dry_run else locked(scope):
                work()
        except LockTakenError:
            self._note(scope / leaves.LOCK, BUSY, reason="its lock is taken: a build is running")
        except FileNotFoundError:
            if scope.exists():
                raise
        except OSError as error:
            if error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ELOOP):
                raise
            problem = (
                f"cannot write {os.fspath(error.filename)!a}: {error.strerror} (with the shim on,"
                " SGLang uses poisoned leaves where they are)"
            )
            if error.errno == errno.EROFS:
                raise CommandError(problem) from error
            # One user's leaf in a cache that many share must not keep all others waiting.
            self.cache.problems.append(problem)
            self._note(scope / leaves.LOCK, LEFT, reason=str(error.strerror))

    def _add_new(self, scope: Path, suspects: list[Path], litter: list[Path]) -> None:
        for path in litter:
            # Still, now that the lock is held: it may be gone or in use since.
            if os.path.lexists(path) and self._is_litter(path):
                size = caches.size(path)
                if not self.dry_run:
                    discard(path)
                self.freed += size
                self._note(path, REMOVED)
        contents: dict[str, list[caches.Leaf]] = {}
        for leaf in map(caches.examine, suspects):
            if leaf.status == caches.POISONED:
                contents.setdefault(leaf.good_name, []).append(leaf)
        for name, copies in contents.items():
            self._add_one(scope / name, copies)

    def _add_one(self, new: Path, copies: list[caches.Leaf]) -> None:
        # The newest of the copies first, so the new leaf takes its place in time.
        newest = caches.modified(copies[0].path)
        action = MERGED
        if caches.examine(new).status == caches.OK:  # a good leaf wins
            if caches.modified(new) < newest and not self.dry_run:
                os.utime(new, ns=(newest, newest))
        elif not os.path.lexists(new) or is_half(new):
            action = MENDED
            if not self.dry_run:
                publish(copies[0], new)
        else:
            for leaf in copies:
                self._note(leaf.path, LEFT, reason=f"{new.name} is in the way")
            return
        for leaf in copies:
            if action == MERGED:
                self.freed += caches.size(leaf.path)
            done = self._note(leaf.path, action, new.name)
            self.replaced.setdefault(new.parent, []).append(done)
            action = MERGED

    def _make_durable(self) -> None:
        # All at once, so that a loss of power finds either leaf; one by one each would
        # have the file system write its journal.
        for scope, actions in self.replaced.items():
            for name in {action.becomes for action in actions}:
                manifest = scope / name / leaves.MANIFEST
                with (
                    contextlib.suppress(FileNotFoundError),
                    named(manifest),
                    open(manifest) as file,
                ):
                    os.fsync(file.fileno())

    def _remove_replaced(self, scope: Path) -> None:
        for action in self.replaced[scope]:
            if caches.examine(scope / action.becomes).status == caches.OK:
                discard(action.path)
            elif os.path.lexists(action.path):
                self._note(action.path, LEFT, reason=f"{action.becomes} is gone again")

    def _is_litter(self, path: Path) -> bool:
        if path.name.startswith(caches.OURS):  # whoever holds the lock: its repair has ended
            return True
        if self.staging_age is None or not leaves.STAGING.fullmatch(path.name):
            return False
        return time.time() - last_change(path) / 1e9 > self.staging_age

    def _note(self, path: Path, action: str, becomes: str = "", reason: str = "") -> Action:
        self.actions.append(Action(path, action, becomes, reason))
        return self.actions[-1]

    @property
    def left(self) -> int:
        """How many leaves or scopes are left to mend."""
        undone = {LEFT, BUSY} | ({MENDED, MERGED} if self.dry_run else set())
        return sum(action.action in undone for action in self.actions)

    def report(self) -> dict[str, Any]:
        """The JSON object that ``repair --json`` prints."""
        counts = Counter(action.action for action in self.actions)
        return {
            "root": str(self.cache.root),
            "dry_run": self.dry_run,
            "mended": counts[MENDED],
            "merged": counts[MERGED],
            "removed": counts[REMOVED],
            "left": self.left,
            "freed_bytes": self.freed,
            "actions": [
                {
                    **ls.place(one.path),
                    "action": one.action,
                    "becomes": one.becomes or None,
                    "reason": one.reason or None,
                }
                for one in self.actions
            ],
        }

    def show(self) -> None:
        """Print the report for people."""
        report = self.report()
        heads = ["target", "module", "build", "leaf", "action", "becomes"]
        rows = [
            [one[name] for name in heads[:-1]] + [one["becomes"] or one["reason"] or ""]
            for one in report["actions"]
        ]
        if rows:
            print(output.table(heads, rows))
        would = "would be " if self.dry_run else ""
        print(
            f"{output.plural(report['mended'], 'leaf', 'leaves')} {would}mended,"
            f" {report['merged']} {would}merged, {output.plural(report['removed'], 'left-over')}"
            f" {would}removed, {output.size(self.freed)} {would}freed;"
            f" {report['left']} left to mend"
        )


@contextlib.contextmanager
def locked(scope: Path) -> Iterator[None]:
    """Hold SGLang's lock of *scope* (``_build_lock``, loader.py).

    Raises LockTakenError, or OSError.
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
                with named(path):
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise LockTakenError from None
                time.sleep(0.05)
        yield
    finally:
        os.close(handle)  # releases the lock


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Let an OSError of a call that works on an open file say that it was *path*."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def publish(old: caches.Leaf, new: Path) -> None:
    """Make the good leaf *new* of the poisoned leaf *old*, complete or not at all.

    The lock of their scope is held. *new* does not exist or is half a leaf. Raises OSError.
    """
    staging = temporary(new.parent)
    try:
        clone(old.path, staging, {leaves.MANIFEST})
        manifest = staging / leaves.MANIFEST
        with named(manifest), open(manifest, "xb") as file:
            file.write(leaves.encode(old.good_entries))
        imitate(old.path / leaves.MANIFEST, manifest)
        imitate(old.path, staging)
        if os.path.lexists(new):
            discard(new)
        os.rename(staging, new)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def clone(source: Path, target: Path, but: Collection[str] = ()) -> None:
    """Make the folder *target* with all that *source* holds, *but* some: by hard links if it can.

    SGLang never changes a file of a leaf, so the two may share them. The caller makes
    *target* itself :func:`imitate` its source. Raises OSError.
    """
    os.mkdir(target)
    with os.scandir(source) as listing:
        for entry in listing:
            if entry.name in but:
                continue
            copy = target / entry.name
            if entry.is_dir(follow_symlinks=False):
                clone(Path(entry.path), copy)
                imitate(Path(entry.path), copy)
                continue
            try:
                os.link(entry.path, copy, follow_symlinks=False)
            except OSError as error:
                if error.errno not in NO_LINKS:
                    raise
                shutil.copyfile(entry.path, copy, follow_symlinks=False)
                imitate(Path(entry.path), copy)


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
    if not path.name.startswith(caches.OURS):
        rubbish = temporary(path.parent)
        try:
            os.rename(path, rubbish)
        except FileNotFoundError:  # pruned
            return
    with contextlib.suppress(OSError):  # its owner may have made it read-only
        rubbish.chmod(0o700)
    shutil.rmtree(rubbish)


def temporary(scope: Path) -> Path:
    """A new name in *scope* that SGLang ignores and the next repair removes."""
    return scope / f"{caches.OURS}{uuid.uuid4().hex}"


def is_half(leaf: Path) -> bool:
    """Whether *leaf* is a folder without a library or manifest, which SGLang never uses."""
    return (
        leaf.is_dir() and not leaf.is_symlink() and caches.examine(leaf).status == caches.INCOMPLETE
    )


def last_change(folder: Path) -> int:
    """When *folder* or a file in it was last modified, in nanoseconds."""
    try:
        with os.scandir(folder) as listing:
            files = [entry.stat(follow_symlinks=False).st_mtime_ns for entry in listing]
    except OSError:
        files = []
    return max([caches.modified(folder), *files])
