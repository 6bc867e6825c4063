"""Which SGLang releases have the fault, and what their default cache root is."""

from __future__ import annotations

import importlib.util
import os

# Read in the wheels: same writer, same default. 0.5.17 and older have no manifest.
AFFECTED = frozenset({"0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"})
DEFAULT_ROOT = "~/.cache/sglang/jit"


def installed() -> str | None:
    """The version of the SGLang that ``import sglang`` would load, without importing it.

    Read from the package's own ``_version.py``: distribution metadata may belong
    to another copy on ``sys.path``. None if SGLang is absent or carries no such file.
    """
    try:
        package = importlib.util.find_spec("sglang")
        if package is None or not package.submodule_search_locations:
            return None
        path = os.path.join(package.submodule_search_locations[0], "_version.py")
        spec = importlib.util.spec_from_file_location("sglang_jitfix._sglang_version", path)
        if spec is None or spec.loader is None:
            return None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return str(module.__version__)
    except Exception:  # absent, broken or half removed: not a known release
        return None
