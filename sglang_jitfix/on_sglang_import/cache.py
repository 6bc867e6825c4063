"""Hook of ``sglang.kernels.jit.utils.compile.cache``, SGLang's JIT build cache (0.5.21)."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from inspect import Parameter
from types import ModuleType
from typing import Any

import wrapt

import sglang_jitfix
from sglang_jitfix.on_sglang_import import lookup

WRITER = {"_to_entries": {"dependencies": True, "build_dir": True}}
LOOKUP = {
    "_read_deps": {"leaf": False},
    "_refresh": {"entries": False},
    "find_prebuilt": {"scope": True, "module_name": True},
    # Called by the wrappers of those three.
    "_resolve_path": {"root": True, "relpath": True},
    "_deps_key": {"entries": False},
    # What makes it sound to trust a unit that is gone.
    "compute_build_key": {"spec": False, "build_file": True},
}


class _Function(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """A wrapped module-level function that still pickles by its name."""

    def __reduce_ex__(self, protocol: Any) -> str:
        return str(self.__name__)


def run(cache: ModuleType) -> None:
    """Wrap the manifest writer of *cache*, and its look-ups.

    ``_to_entries(*, dependencies, build_dir)`` resolves every dependency and drops
    those under *build_dir*, which it does not resolve. Handing it the resolved
    folder makes the comparison the one that was meant, and changes nothing where
    the two are equal. The look-ups are those of :mod:`.lookup`. Functions that do not
    look like that any more are left unpatched, with one warning: an unknown writer
    and all look-ups, or the look-ups alone.
    """
    lookups: dict[str, Callable[..., Any]] = {
        "_read_deps": lookup.read_deps,
        "_refresh": lookup.Refresh(cache),
        "find_prebuilt": lookup.FindPrebuilt(cache),
    }
    if _patch(cache, WRITER, {"_to_entries": _resolve_build_dir}):
        _patch(cache, LOOKUP, lookups)


def _patch(
    cache: ModuleType, known: dict[str, dict[str, bool]], wrappers: dict[str, Callable[..., Any]]
) -> bool:
    """Wrap the functions in *wrappers* if all *known* ones are as known, else none, and warn."""
    for name, parameters in known.items():
        function = getattr(cache, name, None)
        if not inspect.isfunction(function) or not _takes(function, parameters):
            logging.getLogger("sglang_jitfix").warning(
                "%s.%s is not the one known, left unpatched: `sglang-jitfix verify` tells"
                " whether this SGLang still needs it",
                cache.__name__,
                name,
            )
            return False
    for name, wrapper in wrappers.items():
        if isinstance(getattr(cache, name), wrapt.FunctionWrapper):
            continue  # an alias of the module, or two threads: once is enough
        setattr(cache, name, _Function(getattr(cache, name), wrapper))
        sglang_jitfix.debug(f"patched {cache.__name__}.{name}")
    return True


def _takes(function: Callable[..., Any], names: dict[str, bool]) -> bool:
    """Whether *function* takes just *names*, keyword-only where the value is True."""
    kinds = {True: Parameter.KEYWORD_ONLY, False: Parameter.POSITIONAL_OR_KEYWORD}
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name: parameter.kind for parameter in parameters} == {
        name: kinds[keyword_only] for name, keyword_only in names.items()
    }


def _resolve_build_dir(
    writer: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return writer(*args, **{**kwargs, "build_dir": kwargs["build_dir"].resolve()})
