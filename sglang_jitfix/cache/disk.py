"""A cache as the commands read it, without SGLang: its root, scopes, leaves and left-overs.

Whatever lies in it, nothing here waits for ever or reads without bound.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import sglang_jitfix
from sglang_jitfix import leaves, releases
from sglang_jitfix.cache.errors import CommandError

OK, POISONED, UNREADABLE, INCOMPLETE = "ok", "poisoned", "unreadable", "incomplete"
# SGLang looks at names that begin with "deps-" only, so it never sees ours.
OURS = ".sglang-jitfix-"
# Bytes. A manifest of two thousand headers has 300 kB, the largest header of CUDA 13 a few MB.
MAX_TEXT, MAX_DEPENDENCY = 16 << 20, 256 << 20


def root_setting(environment: Mapping[str, str | None]) -> tuple[str, str | None]:
    """The variable that SGLang will obey in *environment*, and its value or None.

    ``sglang.srt.environ`` copies the legacy name over the new one, so it wins.
    """
    for name in (sglang_jitfix.LEGACY_ROOT, sglang_jitfix.ROOT):
        if environment.get(name) is not None:
            return name, environment[name]
    return sglang_jitfix.ROOT, None


def find_root(given: str | None) -> Path:
    """The folder *given*, or the root that SGLang would use in this environment.

    Raises CommandError if that is not known or is no folder.
    """
    if given is None:
        variable, setting = root_setting(sglang_jitfix.found_at_start or os.environ)
        if not setting and releases.installed() not in releases.AFFECTED:
            raise CommandError(f"name the root: {sglang_jitfix.ROOT} is not set, and no SGLang"
                               " is installed here whose default is known")  # fmt: skip
        given = sglang_jitfix.real_root(setting or releases.DEFAULT_ROOT)
        if given is None:
            raise CommandError(f"SGLang cannot use {setting!a}, which {variable} names")
    root = Path(given)
    try:
        mode = root.stat().st_mode
    except FileNotFoundError:
        raise CommandError(f"no such root: {given!a}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CommandError(f"cannot use the root {given!a}: {reason}") from None
    if not stat.S_ISDIR(mode):
        raise CommandError(f"not a folder: {given!a}")
    return root


@dataclass(frozen=True)
class Leaf:
    """One leaf, and what its manifest is worth."""

    path: Path
    status: str
    reason: str  # why it is not ok; empty if it is
    entries: tuple[leaves.Entry, ...]
    own: tuple[leaves.Entry, ...]  # those of its entries that poison it
    is_folder: bool = True  # looked at where it is incomplete

    @property
    def is_to_mend(self) -> bool:
        """Whether it is poisoned, or seems to be but is not named after its list."""
        return self.status == POISONED or (self.status == UNREADABLE and bool(self.own))

    @property
    def good_name(self) -> str:
        """The name of this leaf without the entries that poison it."""
        return leaves.LEAF_PREFIX + leaves.deps_key(self.good_entries)

    @property
    def good_entries(self) -> list[leaves.Entry]:
        """The entries that SGLang would have written."""
        own = set(self.own)
        return [entry for entry in self.entries if entry not in own]


def examine(path: Path) -> Leaf:
    """The state of the leaf at *path*; a leaf that is gone is incomplete."""
    scope = path.parent
    entries: tuple[leaves.Entry, ...] = ()
    own: tuple[leaves.Entry, ...] = ()

    def leaf(status: str, reason: str) -> Leaf:
        is_folder = status != INCOMPLETE or (path.is_dir() and not path.is_symlink())
        return Leaf(path, status, reason, entries, own, is_folder)

    try:
        entries = tuple(leaves.decode(read(path / leaves.MANIFEST)))
    except (FileNotFoundError, NotADirectoryError):
        return leaf(INCOMPLETE, f"no {leaves.MANIFEST}")
    except OSError as error:
        return leaf(UNREADABLE, str(error.strerror))
    except ValueError as error:
        return leaf(UNREADABLE, str(error))
    own = tuple(
        entry
        for entry in entries
        if ".staging-" in entry.relpath
        and leaves.is_own_unit(entry, scope.name)
        and _is_gone(entry, scope)
    )
    library = f"{scope.parent.name}.so"
    if not _is_file_with_content(path / library):
        return leaf(INCOMPLETE, f"no {library}")
    if path.name != leaves.LEAF_PREFIX + leaves.deps_key(entries):
        return leaf(UNREADABLE, "its list does not give its name")
    if not own:
        return leaf(OK, "")
    if len(own) == len(entries):  # SGLang would not have published it
        return leaf(UNREADABLE, "it lists nothing but its own unit")
    return leaf(POISONED, "its list names its own unit, which is gone")


def _is_file_with_content(path: Path) -> bool:
    # A loss of power can leave an empty file, for which no other copy may be given up.
    try:
        status = path.stat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size > 0


def _is_gone(entry: leaves.Entry, scope: Path) -> bool:
    # Where SGLang's anchors lie only SGLang knows. But it was in this scope that the
    # unit lay, unless the cache was moved, which takes a unit along.
    return leaves.is_gone(scope.joinpath(*entry.relpath.split("/")[-2:])) and (
        entry.root != "abs" or leaves.is_gone(entry.relpath)
    )


def read(path: Path, limit: int = MAX_TEXT) -> bytes:
    """The bytes of the regular file at *path*.

    Raises OSError, also where it is no such file or has more than *limit* bytes.
    """
    with open(path, "rb", opener=_open) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        content = file.read(limit + 1)
    if content is None or len(content) > limit:  # None: /proc has files that never end
        raise OSError(errno.EFBIG, f"more than {limit >> 20} MiB", str(path))
    return content


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # what is no file might never end


def digest(path: Path) -> str:
    """The SHA-256 of the file at *path*, as manifests record it; raises OSError like read()."""
    return hashlib.sha256(read(path, MAX_DEPENDENCY)).hexdigest()


class Cache:
    """The cache below *root*; ``problems`` are the folders that could not be listed, in words."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.problems: list[str] = []

    def scopes(self) -> Iterator[Path]:
        """Every scope, by name."""
        for target in self._folders(self.root):
            if target.name != "lost+found":  # the file system's, closed to most users
                for module in self._folders(target):
                    for scope in self._folders(module):
                        if scope.name.startswith("build-"):
                            yield scope

    def leaves(self, scope: Path) -> list[Path]:
        """The leaves of *scope*, newest first as SGLang looks at them."""
        return self._newest_first(scope, leaves.LEAF_PREFIX)

    def left_overs(self, scope: Path) -> list[Path]:
        """The staging folders in *scope*, and temporary ones of a repair, newest first."""
        return self._newest_first(scope, (".staging-", OURS))

    def _folders(self, folder: Path) -> list[Path]:
        return [Path(entry.path) for entry in self._listing(folder) if entry.is_dir()]

    def _newest_first(self, scope: Path, prefix: str | tuple[str, ...]) -> list[Path]:
        found = [Path(e.path) for e in self._listing(scope) if e.name.startswith(prefix)]
        return sorted(found, key=modified, reverse=True)

    def _listing(self, folder: Path) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as listing:
                return sorted(listing, key=lambda entry: entry.name)
        except FileNotFoundError:  # pruned or repaired as we look
            return []
        except OSError as error:
            problem = f"{str(folder)!a}: {error.strerror}"
            if problem not in self.problems:
                self.problems.append(problem)
            return []


def modified(path: Path) -> int:
    """When *path* was last modified, in nanoseconds; 0 if it is gone."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def size(path: Path) -> int:
    """The bytes of all files at and below *path*, less those that cannot be looked at."""
    total, ahead = 0, [os.fspath(path)]
    while ahead:
        try:
            info = os.lstat(here := ahead.pop())
            if stat.S_ISDIR(info.st_mode):
                with os.scandir(here) as listing:
                    ahead.extend(entry.path for entry in listing)
            else:
                total += info.st_size
        except OSError:
            pass
    return total


def place(path: Path) -> dict[str, str]:
    """The names that lead to the leaf or left-over at *path*."""
    return dict(zip(("target", "module", "build", "leaf"), path.parts[-4:], strict=True))
