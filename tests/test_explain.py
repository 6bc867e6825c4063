"""``sglang-jitfix explain`` on copies of a real cache, by the real SGLang."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from cachekit import Built, entries_of, is_own, jitfix, poison, set_age, sglang, write_scope

# What `explain --json` says while scale.h is 3, 4, and not there; for people; and, while
# it is 5, of a cache where 100 newer leaves hide a good one.
EXPLAIN = """
import contextlib, io
from sglang_jitfix.cli.main import main
root, crowded, source = map(pathlib.Path, sys.argv[1:])
header = source / "scale.h"

def explain(root, *arguments):
    cache.clear_digest_cache()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["explain", "--root", str(root), *arguments]) == 0
    return out.getvalue()

header.write_text("#define SCALE 3\\n")
first = json.loads(explain(root, "--json"))
people = explain(root, "one")
assert people == explain(root, "sgl_kernel_jit_one")
header.write_text("#define SCALE 4\\n")
edited = json.loads(explain(root, "--json"))
header.unlink()
vanished = json.loads(explain(root, "--json"))
header.write_text("#define SCALE 5\\n")
print(json.dumps([first, people, edited, vanished, json.loads(explain(crowded, "--json"))]))
"""


def leaves_of(root: Path) -> tuple[list[Path], Path]:
    """The two leaves of "one" built with 3, and the one built with 5."""
    found: dict[Any, list[Path]] = {}
    for leaf in root.glob("*/sgl_kernel_jit_one/build-*/deps-*"):
        content = tuple(entry for entry in entries_of(leaf) if not is_own(entry))
        found.setdefault(content, []).append(leaf)
    (five,), three = sorted(found.values(), key=len)
    return three, five


@pytest.mark.parametrize("shim", ["on", "off"])
def test_verdicts(built: Built, tmp_path: Path, shim: str) -> None:
    root = built.copy(tmp_path / "cache")
    (leaf, garbage), five = leaves_of(root)
    (original,) = built.good.glob("*/*/build-*/deps-*")
    good = shutil.copytree(original, five.parent / original.name)
    (garbage / "sgl_deps.json").write_bytes(b"[")
    half = poison(leaf, age=30)
    (half / "sgl_kernel_jit_one.so").unlink()
    crowded = built.copy(tmp_path / "crowded", built.good)
    (hidden,) = crowded.glob("*/*/build-*/deps-*")
    for number in range(100):
        poison(hidden, age=number)
    set_age(hidden, 1000)

    folders = map(str, (root, crowded, built.source))
    first, people, edited, vanished, crowd = sglang(built, EXPLAIN, shim, *folders)
    on = shim == "on"
    header = str(built.source / "scale.h")
    # With the shim on, a unit that is gone is no reason.
    units = [] if on else [entry[1] for entry in entries_of(leaf) if is_own(entry)]

    def told(rows: list[dict[str, Any]], leaf: Path) -> Any:
        (row,) = (row for row in rows if row["leaf"] == leaf.name)
        return row["status"], row["hit"], row["changed"], sorted(row["vanished"])

    assert told(first, leaf) == ("poisoned", on, [], units)
    assert told(edited, leaf) == ("poisoned", False, [header], units)
    assert told(vanished, leaf) == ("poisoned", False, [], sorted([header, *units]))
    assert told(first, five)[:3] == ("poisoned", False, [header])
    assert told(first, good) == ("ok", False, [header], [])
    assert told(first, garbage) == ("unreadable", False, [], [])
    assert told(first, half)[:2] == ("incomplete", False)
    place = leaf.relative_to(root)
    assert f"{'hit ' if on else 'miss'} {place}\n" in people
    assert f"\n     changed: {header}\n" in people
    assert "\n     unreadable: the manifest is not JSON\n" in people
    assert people.endswith(f"\n5 leaves, {int(on)} SGLang would use now\n")

    assert (crowd[-1]["leaf"], crowd[-1]["hit"]) == (hidden.name, on)
    assert crowd[-1]["reason"] == (None if on else "SGLang looks at 100 leaves, and 100 are newer")


def test_no_such_module(tmp_path: Path) -> None:
    write_scope(tmp_path)
    done = jitfix("explain", "nope\n", "--root", tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"sglang-jitfix: no build of 'nope\\n' in '{tmp_path}'\n"
