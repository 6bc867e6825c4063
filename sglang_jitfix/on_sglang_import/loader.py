"""The loader that runs a hook after one of SGLang's modules, and what goes with it.

Imported by the finder in ``sglang_jitfix/__init__.py`` when SGLang's first hooked
module is asked for.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import sglang_jitfix


def find_spec(
    ours: object, name: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    """The spec of *name* as the finders behind *ours* give it, its loader wrapped.

    None if *name* is not hooked. Raises what the other finders raise.
    """
    run_missed_hooks()
    if name not in sglang_jitfix.HOOKED:
        return None
    # The finders before ours have declined already; asking them again could recurse.
    others = sys.meta_path
    if ours in others:
        others = others[others.index(ours) + 1 :]
    for finder in others:
        find = getattr(finder, "find_spec", None)  # importlib tolerates its absence
        spec: ModuleSpec | None = find and find(name, path, target)
        if spec is not None:
            # A namespace package or a loader older than PEP 451: not the module we know.
            if hasattr(spec.loader, "exec_module"):
                spec.loader = HookLoader(spec.loader)  # type: ignore[assignment]
            return spec
    return None


class HookLoader:
    """Loader that executes a module with its own loader, then runs our hook."""

    def __init__(self, loader: Any) -> None:
        object.__setattr__(self, "loader", loader)

    def __getattr__(self, name: str) -> Any:
        # create_module, get_code, get_source, ...: all the real loader's.
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # ddtrace puts its get_code, which looks at each module's code, on the loader.
        setattr(self.loader, name, value)

    def exec_module(self, module: ModuleType) -> None:
        """Execute *module*; raises what its own loader raises."""
        # From here on inspect, pickle and pkgutil see what they would without us.
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        run_hook(module)


def run_missed_hooks() -> None:
    """Run the hooks of modules that were imported without our loader."""
    for name in tuple(sglang_jitfix.waiting):
        module = sys.modules.get(name)
        # importlib sets _initializing while a module executes: too early then.
        if module and not getattr(module.__spec__, "_initializing", False):
            run_hook(module)


def run_hook(module: ModuleType) -> None:
    """Run the hook of *module*: ``run()`` in our module of the same last name. Never raises."""
    sglang_jitfix.waiting.discard(module.__name__)
    if sglang_jitfix.is_set(sglang_jitfix.DISABLE):  # set by code since the start
        return
    try:
        hook = importlib.import_module(f"{__package__}.{module.__name__.rpartition('.')[2]}")
        hook.run(module)
    except Exception as error:  # an import of SGLang never fails because of us
        logging.getLogger("sglang_jitfix").warning("%s not patched: %r", module.__name__, error)
