"""Look-ups over generated manifests and file changes: see lookup_properties.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support import REPOSITORY, environment

PROPERTIES = ("files_change", "units_exist", "manifest_is_edited", "many_leaves")


@pytest.mark.parametrize(("shim", "verdict"), [("on", "holds"), ("off", "fails")])
def test_properties(tmp_path: Path, shim: str, verdict: str) -> None:
    done = subprocess.run(
        [sys.executable, REPOSITORY / "tests/lookup_properties.py", tmp_path, *PROPERTIES],
        env=environment(tmp_path, shim),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-4:] == [f"{verdict}: {name}" for name in PROPERTIES], (
        done.stderr
    )
