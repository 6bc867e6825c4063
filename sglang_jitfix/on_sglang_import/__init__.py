"""What runs when a process loads SGLang.

``environ.py`` and ``cache.py`` are the hooks of SGLang's modules of those names;
``lookup.py`` is part of the latter.
"""

from __future__ import annotations

import importlib
import logging
import sys
from types import ModuleType

import sglang_jitfix


def run_hooks(module: ModuleType) -> None:
    """Run the hook of *module*, which has just been executed, if it has one; and all missed ones.

    Raises nothing: an import of SGLang never fails because of us.
    """
    for name in sglang_jitfix.missed_hooks():
        missed = sys.modules.get(name)
        if missed is not None:  # or else another thread has removed it
            _run_hook(name, missed)
    if module.__name__ in sglang_jitfix.HOOKED:
        _run_hook(module.__name__, module)


def _run_hook(name: str, module: ModuleType) -> None:
    # By its key in sys.modules, which an alias need not share, and before anything
    # else: whatever happens below is not tried again at every import.
    sglang_jitfix.waiting.discard(name)
    if sglang_jitfix.is_set(sglang_jitfix.DISABLE):  # set by code since the start
        return
    try:
        hook = importlib.import_module(f"{__name__}.{name.rpartition('.')[2]}")
        hook.run(module)
    except Exception as error:
        logging.getLogger("sglang_jitfix").warning("%s not patched: %r", name, error)
