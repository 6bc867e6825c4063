"""Which SGLang releases have the fault, and what their default cache root is."""

from __future__ import annotations

import importlib.util
import os
import runpy

# Read in the wheels: same writer, same default. 0.5.17 and older have no manifest.
AFFECTED = frozenset({"0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"})
DEFAULT_ROOT = "~/.cache/sglang/jit"


def installed() -> str | None:
    """The version of the SGLang that ``import sglang`` would load, without importing it.

    Read from the package's own ``_version.py``: distribution metadata may belong
    to another copy on ``sys.path``. None if SGLang is absent or carries no such file.
    """
    try:
        spec = importlib.util.find_spec("sglang")
        for folder in (spec and spec.submodule_search_locations) or ():
            path = os.path.join(folder, "_version.py")
            if os.path.isfile(path):
                return str(runpy.run_path(path)["__version__"])
    except Exception:  # a broken or half-removed SGLang: not a known release
        pass
    return None
