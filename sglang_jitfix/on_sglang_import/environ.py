"""Hook of ``sglang.srt.environ``, which ``sglang/__init__.py`` imports before all else.

So it runs before SGLang's servers, Runtime or weight-cache daemon start a process.
"""

from __future__ import annotations

import os
from types import ModuleType

import sglang_jitfix
from sglang_jitfix import releases


def run(environ: ModuleType) -> None:
    """Normalise the cache root once more, and name the default one.

    Code may have set the variable since the interpreter started, and *environ* has
    just renamed ``SGL_JIT_CACHE_DIR``. An unset or empty variable gets the default
    root's real path where the release is known to have that default, so that
    children inherit it whatever their home; elsewhere it is left alone.
    """
    sglang_jitfix.normalise_environment()
    if os.environ.get(sglang_jitfix.ROOT):
        return
    release = releases.installed()
    if release not in releases.AFFECTED:
        sglang_jitfix.debug(f"{sglang_jitfix.ROOT}: left unset, default of {release} not known")
        return
    root = sglang_jitfix.real_root(releases.DEFAULT_ROOT)
    if root is not None:
        os.environ[sglang_jitfix.ROOT] = root
    sglang_jitfix.debug(f"{sglang_jitfix.ROOT}: SGLang's default -> {root!a}")
