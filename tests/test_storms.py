"""Many processes at once on one cold linked root, while something goes wrong.

Each storm runs three times: with the shim on a linked root, without it on the plain path
to a folder like that, where all must be the same, and, with fewer processes, without it on
a linked root, which shows that the storm would bring the fault to light.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from forks import Forker
from support import environment, manifests, run, staging_entries

SCRIPT = str(Path(__file__).with_name("storm.py"))

# A storm's trouble (tests/storm.py), its processes, how they end, and the builds they begin.
STORMS: dict[str, tuple[int, dict[str, int], int]] = {
    "none": (64, {"42": 64}, 1),
    # Three of the killed held the lock.
    "kill": (64, {"42": 43, "killed": 21}, 4),
    "two groups": (16, {"42": 16}, 2),
    "no locks": (4, {"OSError ENOLCK": 4}, 0),
    "root removed before the build": (4, {"42": 4}, 1),
}


@dataclass
class Parent:
    """A process that has imported SGLang with its cache root at a folder, and forks storms."""

    folder: Path
    forker: Forker
    boards: int = 0

    @property
    def real(self) -> Path:
        return self.folder / "real"

    def ask(self, processes: int, trouble: str) -> None:
        """Begin a storm; :meth:`answer` waits for its end."""
        board = self.folder / f"board-{self.boards}"
        self.boards += 1
        board.mkdir()
        given = {"real": str(self.real), "board": str(board)}
        self.forker.ask(processes=processes, trouble=trouble, **given)

    def answer(self) -> Any:
        return self.forker.answer()

    def written(self) -> Any:
        """The root's files, staging folders only counted, and the manifests' bytes."""
        files = [path.relative_to(self.real) for path in self.real.rglob("*") if path.is_file()]
        names = [str(path) for path in files if ".staging-" not in str(path)]
        staging = [path for path in self.real.rglob(".staging-*") if path.is_dir()]
        texts = [path.read_bytes() for path in manifests(self.real)]
        return sorted(names), len(staging), texts


@pytest.fixture(scope="module")
def parents(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Parent]]:
    """Three processes: with the shim, without it on a plain path, and with the fault."""
    roots = {"shim": ("link", "on"), "plain": ("real", "off"), "fault": ("link", "off")}
    started: dict[str, Parent] = {}
    try:
        for name, (root, shim) in roots.items():
            folder = tmp_path_factory.mktemp(name).resolve()
            (folder / "link").symlink_to("real")
            env = environment(folder / root, shim)
            started[name] = Parent(folder, Forker(SCRIPT, source, env, folder))
        for parent in started.values():
            assert parent.answer() == "ready"
        yield started
    finally:
        for parent in started.values():
            parent.forker.end()


@pytest.fixture
def cold(parents: dict[str, Parent]) -> dict[str, Parent]:
    """The three processes, their roots made empty."""
    for parent in parents.values():
        if parent.real.exists():
            shutil.rmtree(parent.real)
        parent.real.mkdir()
    return parents


def blow(parents: dict[str, Parent], trouble: str, processes: int) -> dict[str, Any]:
    """How a storm ends in each of the three; the one with the fault gets three processes."""
    for name, parent in parents.items():
        parent.ask(min(processes, 3) if name == "fault" else processes, trouble)
    return {name: parent.answer() for name, parent in parents.items()}


@pytest.mark.parametrize("trouble", STORMS)
def test_storm(cold: dict[str, Parent], trouble: str) -> None:
    processes, outcomes, builds = STORMS[trouble]
    ends = blow(cold, trouble, processes)
    assert ends["shim"] == ends["plain"] == {"outcomes": outcomes, "builds": builds}
    assert cold["shim"].written() == cold["plain"].written()
    calm_after(cold)


def calm_after(parents: dict[str, Parent]) -> None:
    """When all is well again: one more process does the same in both, and no manifest names
    a staging folder but where the fault is."""
    for parent in parents.values():
        parent.real.mkdir(exist_ok=True)
    ends = blow(parents, "none", 1)
    assert ends["shim"] == ends["plain"]
    assert {end["outcomes"]["42"] for end in ends.values()} == {1}
    assert parents["shim"].written() == parents["plain"].written()
    assert staging_entries(parents["shim"].real) == []
    assert staging_entries(parents["fault"].real) != []


@pytest.fixture
def disks(cold: dict[str, Parent]) -> Iterator[str]:
    """A disk of 8 MiB mounted on each of the roots, and the error that writing to it ends with
    when it is full. Where the user may not mount, see ``fill_disk`` in storm.py."""
    mounted = []
    try:
        for parent in cold.values():
            mount = ("mount", "-t", "tmpfs", "-o", "size=8m", "storm", str(parent.real))
            if subprocess.run(mount, capture_output=True, check=False).returncode == 0:
                mounted.append(parent.real)
        yield "ENOSPC" if mounted else "EFBIG"
    finally:
        for root in mounted:
            run("umount", str(root))


@pytest.mark.parametrize("part", ["compiler", "manifest"])
def test_disk_that_fills_up(cold: dict[str, Parent], disks: str, part: str) -> None:
    """SGLang fails, and leaves nothing behind that would count when there is room again."""
    end = {"compiler": "RuntimeError", "manifest": f"OSError {disks}"}[part]
    ends = blow(cold, f"disk full for the {part}", 3)
    assert ends["shim"] == ends["plain"] == {"outcomes": {end: 3}, "builds": 3}
    for parent in cold.values():
        (parent.real / "filler").unlink(missing_ok=True)
        assert manifests(parent.real) == {}
    calm_after(cold)


@pytest.mark.parametrize("moment", ["library is loaded", "manifest"])
def test_root_removed_from_under_a_build(cold: dict[str, Parent], moment: str) -> None:
    """That build fails, the next process builds, and the rest hit."""
    ends = blow(cold, f"root removed before the {moment}", 4)
    assert ends["shim"] == ends["plain"]
    assert ends["shim"]["builds"] == 2
    assert ends["shim"]["outcomes"]["42"] == 3
    calm_after(cold)


def test_no_locks_on_a_warm_root(cold: dict[str, Parent]) -> None:
    """A hit takes no lock. With the fault there is none, so that each process fails."""
    blow(cold, "none", 1)
    ends = blow(cold, "no locks", 4)
    assert ends["shim"] == ends["plain"] == {"outcomes": {"42": 4}, "builds": 0}
    assert ends["fault"] == {"outcomes": {"OSError ENOLCK": 3}, "builds": 0}
