"""A few hundred of the cases of ``hostile_values.py``; run that by hand for ten thousand."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from support import environment, run


def test_values_nobody_would_type(tmp_path: Path) -> None:
    as_root = () if os.geteuid() == 0 else ("unshare", "--map-root-user")
    script = Path(__file__).with_name("hostile_values.py")
    out = run(*as_root, sys.executable, script, "300", env=environment(), cwd=tmp_path)
    agreed, left_alone, not_made = map(int, re.findall(r"\d+", out.splitlines()[-1]))
    assert agreed + left_alone + not_made >= 300
    assert min(agreed, not_made) > 30, "neither kind of case may dry up"
