"""What a repair does to a scope, worked out from what lies in it; no disk is touched here.

The rule: a poisoned leaf becomes the leaf that SGLang would have written. Of copies
the newest does, and the others are merged into it; a good leaf that is there wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_jitfix.cache import disk

MENDED, MERGED, REMOVED, LEFT, BUSY = "mended", "merged", "removed", "left alone", "in use"
WORK = (MENDED, MERGED, REMOVED)


@dataclass(frozen=True)
class Step:
    """What becomes of the leaf or left-over at *path*; the leaf called *becomes* replaces it."""

    path: Path
    action: str
    becomes: str = ""
    reason: str = ""


def steps(found: Sequence[disk.Leaf], left_overs: Iterable[Path] = ()) -> list[Step]:
    """The steps for one scope: *found* are its leaves, newest first, *left_overs* what may go."""
    planned = [
        # A list that names its unit but does not prove that the rule of names is
        # understood is one that a person has to look at.
        Step(leaf.path, LEFT if leaf.is_to_mend else leaf.status, "", leaf.reason)
        for leaf in found
        if leaf.status not in (disk.OK, disk.POISONED)
    ]
    planned += [Step(path, REMOVED) for path in left_overs]
    there = {leaf.path.name: leaf for leaf in found}
    contents: dict[str, list[disk.Leaf]] = {}
    for leaf in found:
        if leaf.status == disk.POISONED:
            contents.setdefault(leaf.good_name, []).append(leaf)
    for name, copies in contents.items():
        good = there.get(name)
        action, reason = MENDED, ""
        if good and good.status == disk.OK:
            action = MERGED
        elif good and not (good.status == disk.INCOMPLETE and good.is_folder):
            action, reason = LEFT, f"{name} is in the way"
        for leaf in copies:
            planned.append(Step(leaf.path, action, "" if reason else name, reason))
            action = LEFT if reason else MERGED
    return planned
