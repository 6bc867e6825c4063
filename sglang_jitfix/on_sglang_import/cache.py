"""Hook of ``sglang.kernels.jit.utils.compile.cache``, SGLang's JIT build cache (0.5.21)."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import wrapt

import sglang_jitfix

WRITER = "_to_entries"


class _Function(wrapt.FunctionWrapper):  # type: ignore[type-arg]
    """A wrapped module-level function that still pickles by its name."""

    def __reduce_ex__(self, protocol: Any) -> str:
        return str(self.__name__)


def run(cache: ModuleType) -> None:
    """Wrap the manifest writer of *cache* so that it knows its staging folder's real path.

    ``_to_entries(*, dependencies, build_dir)`` resolves every dependency and drops
    those under *build_dir*, which it does not resolve. Handing it the resolved
    folder makes the comparison the one that was meant, and changes nothing where
    the two are equal. If the function does not look like that any more, nothing is
    patched and one warning is logged.
    """
    writer = getattr(cache, WRITER, None)
    if isinstance(writer, _Function):
        return  # a finder behind ours, such as ddtrace's, has asked all finders, ours included
    if not inspect.isfunction(writer) or not _takes(writer, {"dependencies", "build_dir"}):
        logging.getLogger("sglang_jitfix").warning(
            "%s.%s is not the one known, left unpatched: `sglang-jitfix verify` tells"
            " whether this SGLang still needs it",
            cache.__name__,
            WRITER,
        )
        return
    setattr(cache, WRITER, _Function(writer, _resolve_build_dir))
    sglang_jitfix.debug(f"patched {cache.__name__}.{WRITER}")


def _takes(function: Callable[..., Any], names: set[str]) -> bool:
    """Whether *names*, keyword-only, are all that *function* takes."""
    parameters = inspect.signature(function).parameters
    return set(parameters) == names and all(
        parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters.values()
    )


def _resolve_build_dir(
    writer: Callable[..., Any], instance: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return writer(*args, **{**kwargs, "build_dir": kwargs["build_dir"].resolve()})
