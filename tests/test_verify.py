"""``sglang-jitfix verify``, run as users run it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest

from conftest import Fresh
from support import OFF, REPOSITORY, environment, new_environment, run, site_packages

VERIFY = ("-m", "sglang_jitfix", "verify")


def verify(
    tmp_path: Path, executable: str | Path = sys.executable, **extra: str
) -> subprocess.CompletedProcess[str]:
    """The finished command; it must leave its temporary folder empty."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = subprocess.run(
        [executable, *VERIFY],
        env=environment(None, **{"TMPDIR": str(temporary), **extra}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert list(temporary.iterdir()) == []
    return done


def table(output: str) -> list[list[str]]:
    """The rows of the table that are about a process or about staging entries."""
    rows = (line.split() for line in output.splitlines())
    return [row for row in rows if row[:1] in (["process"], ["staging"])]


def test_proof(tmp_path: Path, wheel: Path) -> None:
    """In the worst place: a shell that has the shim switched off and a cache root of its own, and
    a package that is all links into uv's cache."""
    executable = new_environment(tmp_path / "env")
    links = environment(None, UV_LINK_MODE="symlink", UV_CACHE_DIR=str(tmp_path / "cache"))
    command = ("uv", "pip", "install", "-q", "--no-deps", "--python", executable, wheel)
    run(*command, env=links)
    site = site_packages(executable)
    assert (site / "sglang_jitfix" / "cli" / "probe.py").is_symlink()
    (site / "sglang.pth").write_text(f"{site_packages(Path(sys.executable))}\n")
    mine = tmp_path / "mine"
    done = verify(tmp_path, executable, SGL_JIT_CACHE_DIR=str(mine), **OFF)
    assert done.returncode == 0, done.stderr
    *processes, staging = table(done.stdout)
    assert [row[2] for row in processes] == ["1", "1", "1"]
    assert [row[4] for row in processes] == ["1", "0", "0"]
    assert staging[-2:] == ["3", "0"]
    assert "The shim works here" in done.stdout
    assert "SGLANG_JITFIX_DISABLE is set" in done.stdout
    assert done.stderr.count("importing SGLang") == 6
    assert not mine.exists()


def test_shim_that_does_not_run(tmp_path: Path) -> None:
    """On sys.path, but its start-up file not where Python reads start-up files."""
    executable = new_environment(tmp_path / "env")
    paths = f"{site_packages(Path(sys.executable))}\n{REPOSITORY}\n"
    (site_packages(executable) / "paths.pth").write_text(paths)
    report = json.loads(run(executable, "-m", "sglang_jitfix", "doctor", "--json"))
    assert report["on"] is report["startup_ran"] is False
    assert any("did not run" in hint for hint in report["hints"])
    done = verify(tmp_path, executable)
    assert done.returncode == 1, done.stderr
    *processes, staging = table(done.stdout)
    assert [row[4] for row in processes] == ["1", "1", "1"]
    assert staging[-1] == "3"
    assert "run `sglang-jitfix doctor`" in done.stdout.splitlines()[-1]


def test_missing_parts(tmp_path: Path, fresh: Fresh) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    without_ninja = {"PATH": str(empty), "CXX": "/bin/sh"}
    cases: list[tuple[str | Path, dict[str, str], str]] = [
        (fresh.with_shim, {}, "no SGLang"),
        (sys.executable, {"PATH": str(empty)}, "'c++', which is not on PATH"),
        (sys.executable, {"CXX": "no-such-compiler"}, "'no-such-compiler'"),
        (sys.executable, without_ninja, "'ninja', which"),
    ]
    for executable, extra, words in cases:
        place = tmp_path / words
        place.mkdir()
        done = verify(place, executable, **extra)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith("sglang-jitfix: ")
        assert done.stderr.count("\n") == 1
        assert words in done.stderr


def test_build_that_fails(tmp_path: Path) -> None:
    """The compiler's own words, then one line."""
    done = verify(tmp_path, CXX="/bin/false")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("sglang-jitfix: SGLang could not build")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_in_the_middle(tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, *VERIFY],
        env=environment(None, TMPDIR=str(tmp_path)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs these tests in the background has them ignore SIGINT.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert process.stderr is not None
        while "process 1 of 3" not in process.stderr.readline():
            assert process.poll() is None
        while not psutil.Process(process.pid).children():  # its first probe
            assert process.poll() is None
        (child,) = psutil.Process(process.pid).children()
        while child.cpu_times().user < 0.5:  # well into its import of SGLang
            assert process.poll() is None
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 128 + number
    assert "Traceback" not in out + err
    assert not child.is_running()
    assert list(tmp_path.iterdir()) == []
