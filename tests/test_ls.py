"""``sglang-jitfix ls`` on caches that the test lays out."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cachekit import (
    DEPENDENCIES,
    NOW,
    Built,
    jitfix,
    mounted_read_only,
    own_unit,
    set_age,
    unprivileged,
    write_leaf,
    write_poisoned,
    write_scope,
)
from sglang_jitfix.cli.main import main
from support import environment

KEYS = [
    *("target", "module", "build", "leaf"),
    *("status", "size_bytes", "modified", "dependencies"),
]
OTHER = "build-fedcba9876543210"


def ls(capsys: pytest.CaptureFixture[str], root: Path, status: int = 0) -> list[dict[str, Any]]:
    """The rows of ``ls --json``."""
    assert main(["ls", "--json", str(root)]) == status
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert all(list(row) == KEYS for row in rows)
    return rows


def status_of(capsys: pytest.CaptureFixture[str], root: Path) -> str:
    """The status of the only leaf below *root*."""
    (row,) = ls(capsys, root)
    return str(row["status"])


def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scope = write_scope(tmp_path)
    good = write_leaf(scope, DEPENDENCIES, age=100)
    poisoned = write_poisoned(scope, age=50)
    other = write_poisoned(write_scope(tmp_path, "n"), age=10)
    rows = ls(capsys, tmp_path)
    assert [(row["leaf"], row["status"], row["dependencies"]) for row in rows] == [
        (poisoned.name, "poisoned", 4),
        (good.name, "ok", 3),
        (other.name, "poisoned", 4),
    ]
    assert rows[0]["target"] == "sm90a"
    assert rows[0]["module"] == "sgl_kernel_jit_m"
    assert rows[0]["build"] == scope.name
    assert rows[0]["size_bytes"] == sum(file.stat().st_size for file in poisoned.iterdir())
    seconds = int(subprocess.check_output(["date", "-d", rows[0]["modified"], "+%s"]))
    assert seconds == int(NOW - 50)


def test_real_builds(built: Built, capsys: pytest.CaptureFixture[str]) -> None:
    found = [(row["module"], row["status"]) for row in ls(capsys, built.poisoned)]
    one, two, both = (f"sgl_kernel_jit_{name}" for name in ("one", "two", "both"))
    assert sorted(found) == sorted((name, "poisoned") for name in (one, one, one, two, both))
    (good,) = ls(capsys, built.good)
    assert (good["module"], good["status"]) == (one, "ok")


def test_table_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scope = write_scope(tmp_path, "a\n\x1b[2J")
    write_leaf(scope, DEPENDENCIES)
    write_poisoned(scope)
    staging = scope / f".staging-{32 * 'a'}"
    staging.mkdir()
    (staging / "cuda.cu").write_text("unit")
    set_age(staging, 7300)
    assert main(["ls", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.isascii()
    assert "\x1b" not in out
    head, *rows, total = out.splitlines()
    assert head.split() == [*KEYS[:5], "size", "modified", "deps"]
    assert all("'sgl_kernel_jit_a\\n\\x1b[2J'" in row for row in rows)
    assert "  staging " in rows[2]
    assert "  2 h old" in rows[2]
    assert total.startswith("2 leaves, ")
    assert total.endswith(": 1 ok, 1 poisoned, 1 staging")


def test_not_a_unit_of_this_build(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scope = write_scope(tmp_path)
    for entry in (own_unit(scope.with_name(OTHER)), own_unit(scope, "mine.h")):
        write_leaf(scope, [*DEPENDENCIES, entry])
    assert [row["status"] for row in ls(capsys, tmp_path)] == ["ok", "ok"]


def test_unit_that_exists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scope = write_scope(tmp_path)
    entry = own_unit(scope)
    write_leaf(scope, [*DEPENDENCIES, entry])
    Path(entry[1]).parent.mkdir()
    Path(entry[1]).touch()
    assert [row["status"] for row in ls(capsys, tmp_path)] == ["ok", "staging"]


def test_below_an_anchor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cache below /usr, say, whose units have paths that only SGLang can resolve."""
    scope = write_scope(tmp_path)
    _, path, digest = own_unit(scope)
    write_leaf(scope, [*DEPENDENCIES, ("sys", path.lstrip("/"), digest)])
    assert status_of(capsys, tmp_path) == "poisoned"


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"\xff\xfe",
        b"{}",
        b"[1]",
        b'[["abs","/a"]]',
        b'[["abs","/a",1]]',
        b"[" * 100000,
        b'[["abs","/\\u0000/.staging-00000000000000000000000000000000/cuda.cu","1"]]',
        b'[["abs","\\ud800","1"]]',
    ],
)
def test_garbage(tmp_path: Path, capsys: pytest.CaptureFixture[str], manifest: bytes) -> None:
    leaf = write_poisoned(write_scope(tmp_path))
    (leaf / "sgl_deps.json").write_bytes(manifest)
    assert status_of(capsys, tmp_path) == "unreadable"


def test_manifest_that_is_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither blocks nor ends the command."""
    leaf = write_poisoned(write_scope(tmp_path))
    manifest = leaf / "sgl_deps.json"
    manifest.unlink()
    os.mkfifo(manifest)
    assert status_of(capsys, tmp_path) == "unreadable"
    manifest.unlink()
    manifest.mkdir()
    assert status_of(capsys, tmp_path) == "unreadable"
    manifest.rmdir()
    assert status_of(capsys, tmp_path) == "incomplete"


def test_half_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leaf = write_poisoned(write_scope(tmp_path))
    (leaf / "sgl_kernel_jit_m.so").unlink()
    assert status_of(capsys, tmp_path) == "incomplete"


def test_other_files_in_the_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scope = write_scope(tmp_path)
    for folder in (tmp_path, scope.parents[1], scope.parent, scope):
        (folder / "README").touch()
        (folder / "notes").mkdir()
        (folder / "loop").symlink_to(".")
    (scope / "deps-file").touch()
    assert status_of(capsys, tmp_path) == "incomplete"


def test_name_that_is_not_utf8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_leaf(write_scope(tmp_path, os.fsdecode(b"\xff")), DEPENDENCIES)
    (row,) = ls(capsys, tmp_path)
    assert row["module"] == "sgl_kernel_jit_\udcff"
    assert main(["ls", str(tmp_path)]) == 0
    assert "'sgl_kernel_jit_\\udcff'" in capsys.readouterr().out


def test_link_below_the_root(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_poisoned(write_scope(tmp_path / "elsewhere"))
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "sm90a").symlink_to(tmp_path / "elsewhere" / "sm90a")
    assert status_of(capsys, tmp_path / "root") == "poisoned"


def test_empty_root(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ls(capsys, tmp_path) == []
    assert main(["ls", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "0 leaves, 0 B\n"


@pytest.mark.parametrize("command", ["ls", "repair", "explain --root"])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gone\n", "no such root: '{}/gone\\n'"),
        ("file", "not a folder: '{}/file'"),
        ("loop", "cannot use the root '{}/loop': Too many levels of symbolic links"),
        ("long" * 2000, "cannot use the root '{}/longlong"),
        ("nul\0", "cannot use the root '{}/nul\\x00': "),
    ],
)
def test_no_such_root(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, name: str, says: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    assert main([*command.split(), f"{tmp_path}/{name}"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("sglang-jitfix: " + says.format(tmp_path))
    assert err.count("\n") == 1


def test_default_root_and_imports(tmp_path: Path) -> None:
    """The root is the one that SGLang would use, and neither SGLang nor torch is loaded."""
    write_poisoned(write_scope(tmp_path / "real"))
    (tmp_path / "link").symlink_to("real")
    code = (
        "import sys; from sglang_jitfix.cli.main import main; status = main(sys.argv[1:])\n"
        "print(status, {'sglang', 'torch', 'wrapt'} & sys.modules.keys(), file=sys.stderr)"
    )
    for command, status in ((["ls", "--json"], 0), (["repair", "--dry-run"], 1)):
        done = subprocess.run(
            [sys.executable, "-c", code, *command],
            env=environment("link"),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == f"{status} set()\n"
        assert "sgl_kernel_jit_m" in done.stdout


def test_read_only_root(tmp_path: Path) -> None:
    write_poisoned(write_scope(tmp_path))
    done = jitfix("ls", tmp_path, prefix=mounted_read_only(tmp_path))
    assert done.returncode == 0
    assert "poisoned" in done.stdout


def test_folder_that_may_not_be_listed(tmp_path: Path) -> None:
    """What can be read is listed; one line names the rest, and the status is 2."""
    write_poisoned(write_scope(tmp_path, "open"))
    closed = write_scope(tmp_path, "closed")
    closed.chmod(0)
    name = str(closed.relative_to(tmp_path))
    done = jitfix("ls", ".", prefix=unprivileged(tmp_path))
    assert done.returncode == 2
    assert "sgl_kernel_jit_open" in done.stdout
    assert done.stderr == f"sglang-jitfix: {name!r}: Permission denied\n"


def test_progress_on_a_terminal_only(tmp_path: Path) -> None:
    for number in range(30):
        write_poisoned(write_scope(tmp_path, build=f"{number:016x}"))
    code = (
        "import sys; from sglang_jitfix.cli import output; output.PROGRESS_INTERVAL = 0\n"
        "from sglang_jitfix.cli.main import main; main(sys.argv[1:])"
    )
    master, terminal = pty.openpty()
    with os.fdopen(master, "rb") as reader, os.fdopen(terminal, "wb") as stderr:
        subprocess.run(
            [sys.executable, "-c", code, "ls", str(tmp_path)],
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            check=True,
        )
        shown = os.read(reader.fileno(), 65536)
    assert b"\r30 leaves" in shown
    assert shown.endswith(b"\r\x1b[K"), "the line is cleared"
    assert jitfix("ls", tmp_path).stderr == ""


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_output_that_cannot_be_written(tmp_path: Path, options: list[str]) -> None:
    write_poisoned(write_scope(tmp_path))
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "sglang_jitfix", "ls", *options, tmp_path],
            env=environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == "sglang-jitfix: No space left on device\n"
