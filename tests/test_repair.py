"""``sglang-jitfix repair``: real caches, and many that the tests lay out."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cachekit import (
    DEPENDENCIES,
    LOADER,
    NOW,
    Built,
    cuda_home,
    entries_of,
    is_own,
    jitfix,
    key,
    mounted_read_only,
    own_unit,
    set_age,
    sglang,
    snapshot,
    unprivileged,
    write_leaf,
    write_poisoned,
    write_scope,
)
from sglang_jitfix.cli import repair
from sglang_jitfix.cli.main import main
from support import environment

GOOD = f"deps-{key(DEPENDENCIES)}"


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads these caches meanwhile, and no lock is given back."""
    monkeypatch.setattr(repair, "LOCK_WAIT", 0.1)


@pytest.fixture
def mend(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run ``repair --json`` on a root in this process: the report, its status checked."""

    def run(root: Path, *options: str, status: int = 0) -> dict[str, Any]:
        assert main(["repair", "--json", *options, str(root)]) == status
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        return report

    return run


def names(folder: Path) -> list[str]:
    """What lies in *folder*, less the lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_mended_leaf_is_what_sglang_would_have_written(tmp_path: Path, mend: Any) -> None:
    scope = write_scope(tmp_path)
    old = write_poisoned(scope, age=50)
    old.chmod(0o750)
    (old / "sgl_deps.json").chmod(0o640)
    (old / "link").symlink_to("nowhere")
    set_age(old / "build.ninja", 70)
    set_age(old / "sgl_deps.json", 60)
    set_age(old, 50)
    before = snapshot(old)
    report = mend(tmp_path)
    assert names(scope) == [GOOD]
    new = scope / GOOD
    manifest = msgspec.json.encode(DEPENDENCIES)
    mode, stamp, _ = before["sgl_deps.json"]
    assert snapshot(new) == {**before, "sgl_deps.json": (mode, stamp, manifest)}
    assert new.stat().st_mtime == pytest.approx(NOW - 50)
    assert new.stat().st_mode & 0o777 == 0o750
    assert report["actions"] == [
        {
            "target": "sm90a",
            "module": "sgl_kernel_jit_m",
            "build": scope.name,
            "leaf": old.name,
            "action": "mended",
            "becomes": GOOD,
            "reason": None,
        }
    ]
    assert (report["mended"], report["merged"], report["left"]) == (1, 0, 0)
    assert mend(tmp_path)["actions"] == []


def test_copies_become_one_as_new_as_the_newest(tmp_path: Path, mend: Any) -> None:
    scope = write_scope(tmp_path)
    copies = [write_poisoned(scope, age) for age in (30, 10, 20)]
    other = write_poisoned(scope, 15, DEPENDENCIES[:2])
    libraries = {copy: (copy / "sgl_kernel_jit_m.so").read_text() for copy in copies}
    freed = sum(file.stat().st_size for copy in (copies[0], copies[2]) for file in copy.iterdir())
    report = mend(tmp_path)
    assert other.name not in names(scope)
    assert names(scope) == sorted([GOOD, f"deps-{key(DEPENDENCIES[:2])}"])
    assert (scope / GOOD).stat().st_mtime == pytest.approx(NOW - 10)
    assert (scope / GOOD / "sgl_kernel_jit_m.so").read_text() == libraries[copies[1]]
    assert (report["mended"], report["merged"], report["freed_bytes"]) == (2, 2, freed)


@pytest.mark.parametrize(("age", "becomes"), [(5, 5), (50, 10)])
def test_good_leaf_wins(tmp_path: Path, mend: Any, age: float, becomes: float) -> None:
    """It keeps its files, and its content keeps its place among the newest."""
    scope = write_scope(tmp_path)
    good = write_leaf(scope, DEPENDENCIES, age)
    before = snapshot(good)
    write_poisoned(scope, 10)
    assert (mend(tmp_path)["mended"], names(scope)) == (0, [GOOD])
    assert snapshot(good) == before
    assert good.stat().st_mtime == pytest.approx(NOW - becomes)


def test_half_a_leaf_in_the_way_is_replaced(tmp_path: Path, mend: Any) -> None:
    scope = write_scope(tmp_path)
    half = write_leaf(scope, DEPENDENCIES)
    (half / "sgl_kernel_jit_m.so").unlink()
    write_poisoned(scope)
    mend(tmp_path)
    assert names(scope) == [GOOD]
    assert (scope / GOOD / "sgl_kernel_jit_m.so").exists()


def test_what_it_does_not_understand_is_left_alone(tmp_path: Path, mend: Any) -> None:
    """A list that does not give its leaf's name, and a name that is taken by something else."""
    scope = write_scope(tmp_path)
    edited = write_poisoned(scope)
    (edited / "sgl_deps.json").write_bytes(msgspec.json.encode([*DEPENDENCIES, own_unit(scope)]))
    taken = write_scope(tmp_path, "n")
    write_poisoned(taken)
    (taken / GOOD).write_text("a file")
    before = {path: snapshot(path) for path in (scope, taken)}
    report = mend(tmp_path, status=1)
    after = {path: snapshot(path) for path in (scope, taken)}
    assert after == before
    reasons = [(one["action"], one["reason"]) for one in report["actions"]]
    assert reasons == [
        ("left alone", "its list does not give its name"),
        ("incomplete", "no sgl_deps.json"),
        ("left alone", f"{GOOD} is in the way"),
    ]


def test_what_is_no_build_is_reported(tmp_path: Path, mend: Any) -> None:
    """There is nothing in it to mend, so the status is 0."""
    scope = write_scope(tmp_path)
    garbage = write_leaf(scope, DEPENDENCIES, name="deps-1")
    (garbage / "sgl_deps.json").write_bytes(b"[[")
    half = write_poisoned(scope)
    (half / "sgl_kernel_jit_m.so").unlink()
    only_unit = write_leaf(scope.with_name("build-00000000000000ff"), [own_unit(scope)])
    empty = write_poisoned(scope)  # as a loss of power leaves it
    (empty / "sgl_kernel_jit_m.so").write_bytes(b"")
    before = snapshot(tmp_path)
    report = mend(tmp_path)
    assert snapshot(tmp_path) == before
    assert sorted(one["action"] for one in report["actions"]) == ["incomplete"] * 2 + ["unreadable"]
    assert only_unit.exists()


def test_dry_run_changes_nothing(tmp_path: Path, mend: Any) -> None:
    scope = write_scope(tmp_path)
    for age in (1, 2):
        write_poisoned(scope, age)
    staging = scope / f".staging-{32 * 'a'}"
    staging.mkdir()
    set_age(staging, 99999)
    before = snapshot(tmp_path)
    would = mend(tmp_path, "--dry-run", "--staging-older-than=1h", status=1)
    assert snapshot(tmp_path) == before
    did = mend(tmp_path, "--staging-older-than=1h")
    assert {**would, "dry_run": False, "left": 0} == did
    assert (did["mended"], did["merged"], did["removed"]) == (1, 1, 1)
    assert mend(tmp_path, "--dry-run")["actions"] == []


def test_staging_left_overs(tmp_path: Path, mend: Any) -> None:
    """Removed only on request, and when neither they nor a file in them is younger."""
    scope = write_scope(tmp_path)
    old, young, busy = (scope / f".staging-{32 * digit}" for digit in "abc")
    day = 86400
    for folder in (old, young, busy):
        folder.mkdir()
        (folder / "cuda.o").touch()
        set_age(folder / "cuda.o", 3 * day)
        set_age(folder, 3 * day)
    set_age(young, day)
    set_age(busy / "cuda.o", day)
    other = scope / ".staging-mine"
    other.mkdir()
    set_age(other, 3 * day)
    everything = names(scope)
    assert mend(tmp_path)["actions"] == []
    assert names(scope) == everything
    assert mend(tmp_path, "--staging-older-than=2d")["removed"] == 1
    assert names(scope) == sorted(path.name for path in (young, busy, other))


@pytest.mark.parametrize("age", ["1", "h", "-1h", "1.5h", "1w", "", "1h\n", "٣h"])
def test_age_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], age: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["repair", f"--staging-older-than={age}", str(tmp_path)])
    assert stop.value.code == 2
    assert f"not an age such as 90s, 30m, 1h or 2d: {age!a}" in capsys.readouterr().err


def test_scope_whose_lock_is_taken(tmp_path: Path, mend: Any) -> None:
    """It is skipped with all that is in it; the others are mended."""
    held, free = write_scope(tmp_path, "held"), write_scope(tmp_path, "free")
    for scope in (held, free):
        write_poisoned(scope)
        staging = scope / f".staging-{32 * 'a'}"
        staging.mkdir()
        set_age(staging, 7300)
    with open(held / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = snapshot(held)
        report = mend(tmp_path, "--staging-older-than=1h", status=1)
        assert snapshot(held) == before
    (skipped,) = (one for one in report["actions"] if one["module"] == "sgl_kernel_jit_held")
    assert (skipped["action"], report["left"]) == ("in use", 1)
    assert names(free) == [GOOD]
    mend(tmp_path, "--staging-older-than=1h")
    assert names(held) == [GOOD]


@pytest.mark.parametrize("lock", ["taken", "a folder", "none of its owner's"])
def test_left_counts_leaves_whatever_stopped_it(tmp_path: Path, lock: str) -> None:
    scope = write_scope(tmp_path)
    for age in (1, 2, 3):
        _, unit, digest = own_unit(scope)
        unit = unit.replace(str(tmp_path), "/elsewhere")
        write_leaf(scope, [("abs", unit, digest), *DEPENDENCIES], age)
    path = scope / ".lock"
    path.mkdir() if lock == "a folder" else path.touch(mode=0o444)
    with open(scope / ".lock") if path.is_file() else open(os.devnull) as file:
        if lock == "taken":
            path.chmod(0o666)
            fcntl.flock(file, fcntl.LOCK_EX)
        done = jitfix("repair", ".", prefix=unprivileged(tmp_path))
    assert done.returncode == (1 if lock == "taken" else 2)
    assert done.stdout.splitlines()[-1].endswith("; 3 left to mend")


def test_links_in_the_cache(tmp_path: Path, mend: Any) -> None:
    """A leaf that is a link becomes a real one; what the link names is left."""
    scope = write_scope(tmp_path / "elsewhere")
    leaf = write_poisoned(scope)
    away = leaf.rename(tmp_path / "away")
    leaf.symlink_to(away)
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "sm90a").symlink_to(tmp_path / "elsewhere" / "sm90a")
    before = snapshot(away)
    mend(tmp_path / "root")
    assert names(scope) == [GOOD]
    assert not (scope / GOOD).is_symlink()
    assert snapshot(away) == before


def test_read_only_root(tmp_path: Path) -> None:
    scope = write_scope(tmp_path)
    write_poisoned(scope)
    before = snapshot(tmp_path)
    for lock in (False, True):
        done = jitfix("repair", tmp_path, prefix=mounted_read_only(tmp_path))
        assert done.returncode == 2
        assert done.stderr == (
            f"sglang-jitfix: cannot write '{scope}/.lock': Read-only file system"
            " (with the shim on, SGLang uses poisoned leaves where they are)\n"
        )
        assert snapshot(tmp_path) == before
        if not lock:
            (scope / ".lock").touch()
            before = snapshot(tmp_path)
    assert jitfix("repair", "--dry-run", tmp_path).returncode == 1


def test_folder_that_may_not_be_written(tmp_path: Path) -> None:
    scope = write_scope(tmp_path)
    _, unit, digest = own_unit(scope)
    # As if from elsewhere: what others cannot reach, they cannot know to be gone.
    unit = unit.replace(str(tmp_path), "/elsewhere")
    write_leaf(scope, [("abs", unit, digest), *DEPENDENCIES])
    scope.chmod(0o555)
    before = snapshot(scope)
    done = jitfix("repair", ".", prefix=unprivileged(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith(f"sglang-jitfix: cannot write '{scope.relative_to(tmp_path)}/")
    assert "Permission denied" in done.stderr
    assert snapshot(scope) == before
    scope.chmod(0o755)


def test_leaves_that_their_owner_made_read_only(tmp_path: Path) -> None:
    scope = write_scope(tmp_path)
    _, unit, digest = own_unit(scope)
    unit = unit.replace(str(tmp_path), "/elsewhere")
    leaf = write_leaf(scope, [("abs", unit, digest), *DEPENDENCIES])
    leaf.chmod(0o555)
    if os.geteuid() == 0:
        for path in (scope, leaf, *leaf.iterdir()):
            os.chown(path, 65534, 65534)
    done = jitfix("repair", ".", prefix=unprivileged(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert names(scope) == [GOOD]
    assert (scope / GOOD).stat().st_mode & 0o777 == 0o555


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another owner")
def test_leaf_that_only_its_owner_may_remove(tmp_path: Path) -> None:
    """It is named and stays, what replaces it is there, and all other scopes are mended."""
    theirs, shared = write_scope(tmp_path, "a"), write_scope(tmp_path, "b")
    leaves = []
    for scope in (theirs, shared):
        _, unit, digest = own_unit(scope)
        unit = unit.replace(str(tmp_path), "/elsewhere")
        leaves.append(write_leaf(scope, [("abs", unit, digest), *DEPENDENCIES]))
        scope.chmod(0o1777)
    for path in (leaves[1], *leaves[1].iterdir()):
        os.chown(path, 65534, 65534)
    done = jitfix("repair", ".", prefix=unprivileged(tmp_path))
    assert done.returncode == 2
    place = leaves[0].relative_to(tmp_path)
    assert done.stderr.startswith(f"sglang-jitfix: cannot write '{place}': Operation not permitted")
    assert done.stdout.splitlines()[-1].endswith("; 1 left to mend")
    assert names(theirs) == sorted([GOOD, leaves[0].name])
    assert names(shared) == [GOOD]


def test_lock_that_is_a_link(tmp_path: Path) -> None:
    """Nothing is made where it leads to."""
    scope, other = write_scope(tmp_path, "a"), write_scope(tmp_path, "b")
    leaf = write_poisoned(scope)
    write_poisoned(other)
    (scope / ".lock").symlink_to(tmp_path / "made")
    done = jitfix("repair", tmp_path)
    assert done.returncode == 2
    assert "too many levels of symbolic links" in done.stderr.lower()
    assert not (tmp_path / "made").exists()
    assert (names(scope), names(other)) == ([leaf.name], [GOOD])


@pytest.mark.parametrize("command", ["repair", "ls", "doctor"])
def test_root_that_is_empty(command: str) -> None:
    done = jitfix(command, "")
    assert (done.returncode, done.stderr) == (2, "sglang-jitfix: the root is empty\n")


FULL_DISK = """
mount -t tmpfs -o size=256k none "$1" && cp -a "$2/sm90a" "$1"
dd if=/dev/zero of="$1/filler" bs=4k 2>/dev/null
"$3" -m sglang_jitfix repair "$1"
echo "status $?"
find "$1" -path '*/build-*/*' -printf '%P\\n' | sort
rm "$1/filler"
"$3" -m sglang_jitfix repair "$1"
echo "status $?"
"""


def test_full_disk(tmp_path: Path) -> None:
    """One line, no build lost; with room again, the rest is mended."""
    scope = write_scope(tmp_path / "cache")
    leaf = write_poisoned(scope)
    write_poisoned(write_scope(tmp_path / "cache", "z"))  # which it does not come to
    (tmp_path / "disk").mkdir()
    names = map(str, (tmp_path / "disk", tmp_path / "cache", sys.executable))
    options = "-m" if os.geteuid() == 0 else "-rm"
    done = subprocess.run(
        ["unshare", options, "sh", "-c", FULL_DISK, "sh", *names],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.startswith(f"sglang-jitfix: '{tmp_path}/disk/sm90a/")
    assert done.stderr.endswith(": No space left on device\n")
    assert done.stderr.count("\n") == 1
    first, second = done.stdout.split("status 2\n")
    place = leaf.relative_to(tmp_path / "cache")
    left = [line for line in second.splitlines() if line.startswith(str(place.parent))]
    kept = [*map(str, (place, *(place / file for file in sorted(names_of(leaf)))))]
    assert [line for line in left if not line.endswith(".lock")] == kept
    assert first.startswith("0 leaves mended")
    assert first.endswith("; 2 left to mend\n")
    assert second.endswith("0 left to mend\nstatus 0\n")


def names_of(folder: Path) -> list[str]:
    return os.listdir(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another owner")
def test_owner_is_kept(tmp_path: Path, mend: Any) -> None:
    """A root that mends a user's cache leaves it to the user, the new lock included."""
    scope = write_scope(tmp_path)
    leaf = write_poisoned(scope)
    for path in (scope, leaf, *leaf.iterdir()):
        os.chown(path, 1234, 1235)
    mend(tmp_path)
    for path in (scope / ".lock", scope / GOOD, *(scope / GOOD).iterdir()):
        assert (path.stat().st_uid, path.stat().st_gid) == (1234, 1235)


def refuse(*arguments: Any, **options: Any) -> None:
    raise OSError(95, "Operation not supported")


def test_file_system_without_hard_links(
    tmp_path: Path, mend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in: os.link answers what such a file system answers."""
    scope = write_scope(tmp_path)
    leaf = write_poisoned(scope, age=10)
    set_age(leaf / "build.ninja", 20)
    before = snapshot(leaf)
    monkeypatch.setattr(os, "link", refuse)
    mend(tmp_path)
    after = snapshot(scope / GOOD)
    assert {**after, "sgl_deps.json": None} == {**before, "sgl_deps.json": None}
    assert names(scope) == [GOOD]


# Ends itself by SIGKILL just before the n-th thing it asks of the file system.
KILLED = """
import os, signal, sys
from sglang_jitfix.cli import repair
from sglang_jitfix.cli.main import main
left = int(sys.argv[1])
asks = {"open", "shutil.rmtree", "os.listdir", "fcntl.flock"}
def count(event, arguments):
    global left
    if event in asks or event.startswith("os.") and event != "os.putenv":
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(count)
status = main(["repair", "--staging-older-than=1h", sys.argv[2]])
print(int(sys.argv[1]) - left)
sys.exit(status)
"""


def lay_out_for_killing(root: Path) -> dict[Path, set[str]]:
    """A cache of several scopes; by scope, the names of the good leaves it must end with."""
    expected = {}
    for module in ("a", "b", "c"):
        scope = write_scope(root, module)
        write_poisoned(scope, 30)
        write_poisoned(scope, 20)
        write_poisoned(scope, 10, DEPENDENCIES[:2])
        expected[scope] = {GOOD, f"deps-{key(DEPENDENCIES[:2])}"}
    write_leaf(root / "sm90a" / "sgl_kernel_jit_b" / scope.name, DEPENDENCIES, 40)
    half = write_leaf(root / "sm90a" / "sgl_kernel_jit_c" / scope.name, DEPENDENCIES, 40)
    (half / "sgl_kernel_jit_c.so").unlink()
    staging = scope / f".staging-{32 * 'a'}"
    staging.mkdir()
    (staging / "cuda.cu").touch()
    set_age(staging / "cuda.cu", 7300)
    set_age(staging, 7300)
    return expected


def contents(scope: Path) -> set[str]:
    """The good names of all complete leaves in *scope* whose lists give their names."""
    found = set()
    for leaf in scope.glob("deps-*"):
        if (leaf / f"{scope.parent.name}.so").exists() and (leaf / "sgl_deps.json").exists():
            entries = entries_of(leaf)
            assert leaf.name == f"deps-{key(entries)}"
            found.add(f"deps-{key([entry for entry in entries if not is_own(entry)])}")
    return found


def test_killed_at_a_hundred_points(tmp_path: Path, mend: Any) -> None:
    """By SIGKILL between two system calls: no build is lost, and the next repair ends clean."""

    def killed_after(count: int, root: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", KILLED, str(count), str(root)],
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )

    root = tmp_path / "whole"
    expected = lay_out_for_killing(root)
    whole = killed_after(-1, root)
    assert whole.returncode == 0, whole.stderr
    asked = int(whole.stdout.splitlines()[-1])
    assert asked > 200, "the hook counts too little"
    stages = set()
    for count in random.Random(1).sample(range(1, asked), 100):
        root = tmp_path / str(count)
        expected = lay_out_for_killing(root)
        assert killed_after(count, root).returncode == -signal.SIGKILL
        state = []
        for scope, good in expected.items():
            assert contents(scope) == good, f"lost when killed at {count} of {asked}"
            state.append(len([*scope.rglob("*")]))
        stages.add(tuple(state))
        mend(root, "--staging-older-than=1h")
        assert {scope: set(names(scope)) for scope in expected} == expected
        shutil.rmtree(root)
    assert len(stages) > 10, "it was always killed in the same state"


def test_two_repairs_at_once(tmp_path: Path) -> None:
    for number in range(20):
        lay_out_for_killing(tmp_path / str(number))
        (tmp_path / str(number) / "sm90a").rename(tmp_path / f"sm{number}")
        (tmp_path / str(number)).rmdir()
    command = [sys.executable, "-m", "sglang_jitfix", "repair", str(tmp_path)]
    repairs = [
        subprocess.Popen(
            command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        for _ in range(2)
    ]
    try:
        for process in repairs:
            _, err = process.communicate(timeout=120)
            assert (process.returncode, err) == (0, b"")
    finally:
        for process in repairs:
            process.kill()
            process.wait()
    good = sorted([GOOD, f"deps-{key(DEPENDENCIES[:2])}"])
    for scope in tmp_path.glob("*/*/build-*"):
        assert [name for name in names(scope) if not name.startswith(".staging-")] == good


LOOK_UP = """
source, *roots = map(pathlib.Path, sys.argv[1:])
modules = ("one", 3), ("one", 5), ("two", 3), ("both", 3)
print(json.dumps([[load(root, name, source, scale) for name, scale in modules] for root in roots]))
"""


def test_real_sglang_without_the_shim_uses_what_was_mended(
    built: Built, tmp_path: Path, mend: Any
) -> None:
    """A leaf made by the fault becomes, byte for byte, the one that a plain root gave."""
    before, after = built.copy(tmp_path / "before"), built.copy(tmp_path / "after")
    report = mend(after)
    assert (report["mended"], report["merged"]) == (4, 1)
    found = sglang(built, LOOK_UP, "off", str(built.source), str(before), str(after))
    assert found == [["miss"] * 4, ["hit"] * 4]
    (good,) = built.good.glob("*/*/build-*/deps-*")
    mended = after / good.relative_to(built.good)
    assert (mended / "sgl_deps.json").read_bytes() == (good / "sgl_deps.json").read_bytes()
    assert sorted(names_of(mended)) == sorted(names_of(good))


BUILDER = """
root, source = map(pathlib.Path, sys.argv[1:])
print("ready", flush=True)
sys.stdin.readline()
verdicts = [load(root, name, source, 3) for _ in range(2) for name in ("x", "y")]
print(json.dumps(verdicts), flush=True)
sys.stdin.readline()
os.environ["SGLANG_CRASH_ON_JIT_COMPILE"] = "1"
print(json.dumps([load(root, name, source, 3) for name in ("x", "y")]))
"""


def next_lines(processes: list[subprocess.Popen[str]], errors: Path) -> list[Any]:
    """The next line of each of *processes*, decoded, less what SGLang prints."""
    lines = []
    for process in processes:
        assert process.stdout is not None
        while (line := process.stdout.readline()) and line != "ready\n" and line[0] != "[":
            pass
        assert line, errors.read_text()
        lines.append(line if line == "ready\n" else json.loads(line))
    return lines


def tell(processes: list[subprocess.Popen[str]]) -> None:
    """Let each of *processes* go on."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go on\n")
        process.stdin.flush()


def test_while_four_processes_build(
    built: Built, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each builds two modules twice, into the same scopes, while these are mended all along."""
    source = shutil.copytree(built.source, tmp_path / "source")
    (source / "scale.h").write_text("#define SCALE 3\n")
    root, errors = tmp_path / "root", tmp_path / "errors"
    root.mkdir()
    (tmp_path / "link").symlink_to(root)
    with ThreadPoolExecutor() as threads, open(errors, "w") as stderr:
        builders = [
            subprocess.Popen(
                [sys.executable, "-c", LOADER + BUILDER, str(tmp_path / "link"), str(source)],
                env=environment(None, "off", CUDA_HOME=cuda_home()),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
            for _ in range(4)
        ]
        try:
            assert next_lines(builders, errors) == ["ready\n"] * 4
            tell(builders)
            verdicts = threads.submit(next_lines, builders, errors)
            mended = 0
            while not verdicts.done():
                assert main(["repair", "--json", str(root)]) in (0, 1)
                mended += json.loads(capsys.readouterr().out)["mended"]
            assert {verdict for one in verdicts.result() for verdict in one} <= {"built", "hit"}
            assert mended > 0, "nothing was mended while they built"
            assert main(["repair", str(root)]) == 0
            assert [len(names(scope)) for scope in root.glob("*/*/build-*")] == [1, 1]
            tell(builders)
            assert next_lines(builders, errors) == [["hit", "hit"]] * 4
        finally:
            for builder in builders:
                builder.kill()
                builder.communicate()
