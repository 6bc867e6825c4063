"""``sglang-jitfix doctor``: what it says in the places users ask it from."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cachekit import DEPENDENCIES, write_leaf, write_poisoned, write_scope
from sglang_jitfix import LEGACY_ROOT, ROOT
from support import OFF, environment, run, site_packages


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "first").symlink_to("link")
    return tmp_path.resolve()


def doctor(folder: Path, given: str | None = None, *options: str, **extra: str) -> dict[str, Any]:
    """The JSON report of a fresh process, which must load neither SGLang nor torch."""
    code = (
        "import sys; from sglang_jitfix.cli.main import main; status = main(['doctor', '--json'])\n"
        "loaded = {name.split('.')[0] for name in sys.modules} & {'sglang', 'torch', 'wrapt'}\n"
        "sys.exit(status or str(loaded) if loaded else status)"
    )
    done = subprocess.run(
        [sys.executable, *options, "-c", code],
        env=environment(given, **extra),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_report(folder: Path) -> None:
    report = doctor(folder, "first/cache")
    assert report["on"] is report["startup_ran"] is report["sglang_known_affected"] is True
    assert report["startup_file"] == str(site_packages(Path(sys.executable)) / "sglang_jitfix.pth")
    assert report["sglang_version"] == "0.5.21"
    assert (report["root_variable"], report["root_given"]) == (ROOT, "first/cache")
    assert report["root_resolved"] == f"{folder}/real/cache"
    assert report["links"] == [
        {"link": f"{folder}/first", "target": "link"},
        {"link": f"{folder}/link", "target": f"{folder}/real"},
    ]
    assert report["hints"] == []


def test_report_for_people(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sglang_jitfix", "doctor"],
        env=environment("link\n"),
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    rows = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if " " in line)
    assert rows["shim"] == "0.1.0, on: the start-up file ran in this interpreter"
    assert "'link\\n'" in done.stdout, "a value is printed on one line, whatever is in it"


@pytest.mark.parametrize("given", [None, ""])
def test_default_root(folder: Path, given: str | None) -> None:
    report = doctor(folder, given, HOME=f"{folder}/link")
    assert report["root_given"] == given
    assert report["root_default"] == "~/.cache/sglang/jit"
    assert report["root_resolved"] == f"{folder}/real/.cache/sglang/jit"


def test_another_root(folder: Path) -> None:
    command = (sys.executable, "-m", "sglang_jitfix", "doctor", "--json", "link/other")
    report = json.loads(run(*command, env=environment("real"), cwd=folder))
    assert (report["root_variable"], report["root_given"]) == ("ROOT", "link/other")
    assert report["root_resolved"] == f"{folder}/real/other"


def test_off(folder: Path) -> None:
    report = doctor(folder, "link", **OFF)
    assert (report["on"], report["startup_ran"]) == (False, True)
    assert report["why"] == "SGLANG_JITFIX_DISABLE is set"
    for given, home, never_found in (
        ("link", "real", True),
        (f"{folder}/link", "real", True),
        (None, "link", True),
        (f"{folder}/real/", "real", False),
        (None, "real", False),
        ("~/x", "real", False),
    ):
        for shim in ({}, OFF):
            report = doctor(folder, given, **{"HOME": f"{folder}/{home}", **shim})
            assert hint(report, "is not canonical") == (never_found and shim == OFF), given


def hint(report: dict[str, Any], words: str) -> bool:
    return any(words in hint for hint in report["hints"])


def test_hints(folder: Path) -> None:
    (folder / "file").touch()
    (folder / "loop").symlink_to("loop")
    for given, words in (
        ("$HOME/cache", "literal $"),
        ("cache ", "white space"),
        ("file", "is not a directory"),
        ("file/cache", "cannot use"),
        ("loop", "cannot use"),
        ("~no-such-user-here/x", "cannot use"),
    ):
        assert hint(doctor(folder, given), words), given
        assert not hint(doctor(folder, "real"), words), given
    assert hint(doctor(folder, "link", SGLANG_CACHE_DIR="/x"), "does not follow")
    assert hint(doctor(folder, None, **{LEGACY_ROOT: "link"}), "old name")


def test_root_that_is_not_writable(folder: Path) -> None:
    # To root every folder is writable but those of a file system that never is.
    assert hint(doctor(folder, "/proc/self"), "not writable")
    assert not hint(doctor(folder, "link"), "not writable")


def test_deleted_working_directory(folder: Path) -> None:
    command = f'rmdir "$PWD" && exec "{sys.executable}" -m sglang_jitfix doctor'
    (folder / "gone").mkdir()
    done = subprocess.run(
        ["sh", "-c", command], env=environment("x"), cwd=folder / "gone", capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"cannot use 'x'" in done.stdout


def test_bad_command_line(folder: Path) -> None:
    for arguments in ([], ["cure"], ["doctor", "--jsn"]):
        done = subprocess.run(
            [sys.executable, "-m", "sglang_jitfix", *arguments],
            env=environment(),
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


def test_poisoned_leaves(folder: Path) -> None:
    """Copies of one build are what is wasted; the hint says what to type."""
    assert doctor(folder, "link/cache")["poisoned_leaves"] is None, "no cache yet"
    scope = write_scope(folder / "real" / "cache")
    write_leaf(scope, DEPENDENCIES)
    report = doctor(folder, "link/cache")
    assert (report["poisoned_leaves"], report["hints"]) == (0, [])
    copies = [write_poisoned(scope), write_poisoned(scope)]
    write_poisoned(scope, entries=DEPENDENCIES[:2])
    report = doctor(folder, "link/cache")
    assert (report["poisoned_leaves"], report["wasted_compiles"]) == (3, 2)
    assert report["wasted_bytes"] == sum(
        file.stat().st_size for leaf in copies for file in leaf.iterdir()
    )
    (hint,) = report["hints"]
    assert "`sglang-jitfix repair`" in hint


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_toolkit_that_is_not_canonical(folder: Path, variable: str) -> None:
    """SGLang's build key has it as it is spelled; of the two, CUDA_HOME counts."""
    for toolkit, odd in (("link", True), ("real/", True), ("real", False), ("link/../real", True)):
        path = f"{folder}/{toolkit}"
        assert hint(doctor(folder, "real", **{variable: path}), "spell it alike") == odd
    both = {"CUDA_HOME": f"{folder}/real", "CUDA_PATH": f"{folder}/link"}
    assert not hint(doctor(folder, "real", **both), "spell it alike")


def test_finder_behind_pythons_own(folder: Path) -> None:
    (folder / "sitecustomize.py").write_text("import sys\nsys.meta_path.reverse()\n")
    assert hint(doctor(folder, "real", PYTHONPATH=str(folder)), "behind Python's own")
