"""How the hooks get to run: the loader of SGLang's two modules that have one.

Imported by the finder's ``find_spec``, during which importlib holds the interpreter-wide
import lock. So nothing is imported here that another thread may be importing and wait
for that lock: not even ``__future__``.
"""

import sys

import sglang_jitfix

# What typing.TYPE_CHECKING is to a type checker, without importing typing.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


def find_spec(
    name: str, path: "Sequence[str] | None", target: "ModuleType | None"
) -> "ModuleSpec | None":
    """The spec of a module that has a hook to run, its loader wrapped; None for every other.

    As ``find_spec`` in sglang_jitfix, which calls this one.
    """
    if name not in sglang_jitfix.HOOKED and not missed_hooks():
        return None
    # The finders before us have declined already; asking them again could recurse.
    others = sys.meta_path
    if sglang_jitfix in others:
        others = others[others.index(sglang_jitfix) + 1 :]
    for finder in others:
        find = getattr(finder, "find_spec", None)  # importlib tolerates its absence
        spec: ModuleSpec | None = find and find(name, path, target)
        if spec is not None:
            # A namespace package or a loader older than PEP 451 is left alone.
            if hasattr(spec.loader, "exec_module"):
                spec.loader = HookLoader(spec.loader)  # type: ignore[assignment]
            return spec
    return None


def missed_hooks() -> "list[str]":
    """The hooked modules that were loaded without us, by a finder that answered before ours.

    The next module that we are asked for runs their hooks.
    """
    names = tuple(sglang_jitfix.waiting)
    loaded = [(name, getattr(sys.modules.get(name), "__spec__", None)) for name in names]
    # importlib sets _initializing while a module executes: too early then.
    return [name for name, spec in loaded if spec and not getattr(spec, "_initializing", False)]


class HookLoader:
    """Loader that executes a module with its own loader, then runs our hook."""

    def __init__(self, loader: "Any") -> None:
        object.__setattr__(self, "loader", loader)

    def __getattr__(self, name: str) -> "Any":
        # create_module, get_code, get_source, ...: all the real loader's.
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: "Any") -> None:
        # ddtrace puts its get_code, which looks at each module's code, on the loader.
        setattr(self.loader, name, value)

    def exec_module(self, module: "ModuleType") -> None:
        """Execute *module*; raises what its own loader raises."""
        try:
            # From here on inspect, pickle and pkgutil see what they would without us.
            module.__loader__ = module.__spec__.loader = self.loader  # type: ignore[union-attr]
        except AttributeError:  # a module without these, which importlib tolerates too
            pass
        self.loader.exec_module(module)
        try:
            from sglang_jitfix.on_sglang_import import hooks

            hooks.run_hooks(module)
        except Exception:  # uninstalled since this process started
            pass
