"""What a repair would do, planned for leaves that lie on no disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachekit import DEPENDENCIES, key, own_unit
from sglang_jitfix.cache import disk
from sglang_jitfix.cli import plan
from sglang_jitfix.leaves import Entry

SCOPE = Path("/cache/sm90a/sgl_kernel_jit_m/build-0123456789abcdef")
GOOD = f"deps-{key(DEPENDENCIES)}"


def leaf(name: str, status: str, own: bool = False, is_folder: bool = True) -> disk.Leaf:
    unit = (Entry(*own_unit(SCOPE)),) if own else ()
    entries = (*(Entry(*entry) for entry in DEPENDENCIES), *unit)
    return disk.Leaf(SCOPE / name, status, "why", entries, unit, is_folder)


FIRST, SECOND = (leaf(name, disk.POISONED, own=True) for name in ("deps-1", "deps-2"))


@pytest.mark.parametrize(
    ("there", "actions"),
    [
        ([], [("deps-1", "mended", GOOD), ("deps-2", "merged", GOOD)]),
        (
            [leaf(GOOD, disk.OK)],
            [("deps-1", "merged", GOOD), ("deps-2", "merged", GOOD)],
        ),
        (
            [leaf(GOOD, disk.INCOMPLETE)],
            [(GOOD, "incomplete", ""), ("deps-1", "mended", GOOD), ("deps-2", "merged", GOOD)],
        ),
        (
            [leaf(GOOD, disk.INCOMPLETE, is_folder=False)],
            [(GOOD, "incomplete", ""), ("deps-1", "left alone", ""), ("deps-2", "left alone", "")],
        ),
        (
            [leaf(GOOD, disk.UNREADABLE)],
            [(GOOD, "unreadable", ""), ("deps-1", "left alone", ""), ("deps-2", "left alone", "")],
        ),
        (
            [leaf("deps-3", disk.UNREADABLE, own=True)],
            [("deps-3", "left alone", ""), ("deps-1", "mended", GOOD), ("deps-2", "merged", GOOD)],
        ),
    ],
)
def test_steps(there: list[disk.Leaf], actions: list[tuple[str, str, str]]) -> None:
    planned = plan.steps([FIRST, SECOND, *there])
    assert [(step.path.name, step.action, step.becomes) for step in planned] == actions
    assert all(step.reason for step in planned if step.action == plan.LEFT)


def test_left_overs() -> None:
    staging = SCOPE / ".staging-1"
    assert plan.steps([leaf(GOOD, disk.OK)], [staging]) == [plan.Step(staging, plan.REMOVED)]
