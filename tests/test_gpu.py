"""The check for a machine with a GPU: run where there is one, and rehearsed where there is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import gpu_check
from support import environment

SCRIPT = str(Path(gpu_check.__file__))


def check(*options: str) -> subprocess.CompletedProcess[str]:
    """The finished script; it ends by itself within its own limit."""
    return subprocess.run(
        [sys.executable, SCRIPT, *options],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=gpu_check.LIMIT + 60,
        check=False,
    )


def test_on_the_device() -> None:
    done = check()
    if done.returncode == gpu_check.NO_DEVICE and not gpu_check.device_exists():
        pytest.skip(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout
    assert "FAIL" not in done.stdout


def test_all_but_the_device() -> None:
    done = check("--without-device")
    assert done.returncode == 0, done.stdout
    findings = done.stdout.splitlines()
    assert [line[:5] for line in findings] == ["ok   "] * 9, done.stdout
    assert findings[-3] == "ok   2 manifests, 0 staging entries"
    assert findings[-1] == "ok   shim off, second process: has to compile"
