"""What runs at every interpreter start of this environment: this file and nothing else.

``sglang_jitfix.pth`` calls :func:`init`. It gives ``SGLANG_JIT_CACHE_DIR`` its
canonical spelling and puts one finder on ``sys.meta_path``: this module. The package's
other modules are imported only when SGLang itself is, or by the command line.
"""

# Loaded by the interpreter before any .pth file, like os, which each function imports
# for itself: the finder lives to the interpreter's last moment, and were os among its
# globals, the late clean-up of os would cost as much as all the rest of this file.
import sys

# What typing.TYPE_CHECKING is to a type checker, without importing typing.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

ROOT = "SGLANG_JIT_CACHE_DIR"
# SGLang copies each SGL_* variable over its SGLANG_* name in every process that
# imports it, so a child would get the old spelling back if this one kept it.
LEGACY_ROOT = "SGL_JIT_CACHE_DIR"
DISABLE = "SGLANG_JITFIX_DISABLE"
DEBUG = "SGLANG_JITFIX_DEBUG"

# The two variables as init() found them, for `sglang-jitfix doctor`; empty until it runs.
found_at_start: "dict[str, str | None]" = {}

# The modules of SGLang that we hook, and those of them whose hook has not run yet.
HOOKED = ("sglang.srt.environ", "sglang.kernels.jit.utils.compile.cache")
waiting = {*HOOKED}


def init() -> None:
    """Normalise the cache root and watch for SGLang's import.

    Takes and returns nothing, raises nothing, prints nothing unless
    ``SGLANG_JITFIX_DEBUG`` is set. A second call changes nothing: before
    Python 3.13 ``site`` reads a virtual environment's ``.pth`` files twice.
    """
    import os

    if found_at_start:
        return
    for name in (ROOT, LEGACY_ROOT):
        found_at_start[name] = os.environ.get(name)
    if is_set(DISABLE):
        debug(f"off: {DISABLE} is set")
        return
    normalise_environment()
    # First, because the finders that do the work (PathFinder, editable installs)
    # answer for good. For all modules but SGLang's two ours declines. Not a class:
    # that would cost a tenth more, and importlib asks for no more than find_spec.
    sys.meta_path.insert(0, sys.modules[__name__])


def is_set(name: str) -> bool:
    """Whether the environment variable *name* is anything but empty, 0, false, no, n or off."""
    import os

    value = os.environ.get(name, "").strip().lower()
    return value not in ("", "0", "false", "no", "n", "off")


def debug(message: str) -> None:
    """Write *message* and the pid as one line to stderr if ``SGLANG_JITFIX_DEBUG`` is set."""
    if is_set(DEBUG) and sys.stderr is not None:  # print(file=None) would write to stdout
        import os

        try:
            print(f"sglang-jitfix[{os.getpid()}]: {message}", file=sys.stderr)
        except Exception:  # a closed stderr is no reason to fail
            pass


def normalise_environment() -> None:
    """Give the cache-root variables that are set and not empty their canonical spelling."""
    import os

    for name in (ROOT, LEGACY_ROOT):
        value = os.environ.get(name)
        if value:
            root = real_root(value)
            if root is None:
                debug(f"{name}: left as it is, SGLang cannot use it: {value!a}")
            elif root != value:
                os.environ[name] = root  # putenv as well: children inherit it
                debug(f"{name}: {value!a} -> {root!a}")
            else:
                debug(f"{name}: canonical already: {value!a}")


def real_root(value: str) -> "str | None":
    """The real absolute path of the directory SGLang would use for *value*.

    *value* is a non-empty ``SGLANG_JIT_CACHE_DIR``. SGLang 0.5.21 computes
    ``pathlib.Path(value).expanduser()`` (``cache.py``, ``cache_root``) and hands
    the result to the operating system. The directory need not exist and is not
    made. Returns None, and never raises, for what SGLang cannot resolve or the
    system cannot reach: an unknown ``~user``, a loop of links, a file in the
    way, a deleted working directory, a path that is too long.
    """
    import os

    try:
        # pathlib drops empty and "." parts before it looks for "~", so "./~" is a
        # home as well. Spelled out here because importing pathlib costs more than
        # everything else in this file.
        parts = [part for part in value.split("/") if part not in ("", ".")]
        path = value
        if parts and parts[0][0] == "~" and value[0] != "/":
            home = os.path.expanduser(parts[0])
            if home[0] == "~":  # pathlib raises RuntimeError here
                return None
            path = os.path.join(home, *parts[1:])
        real = os.path.realpath(path)
        for spelling in (path, real):
            try:
                os.stat(spelling)
            except FileNotFoundError:
                pass  # SGLang makes it
        return real
    except Exception:  # at interpreter start nothing may escape
        return None


def find_spec(
    name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
) -> "ModuleSpec | None":
    """The meta path finder's method: a hooked module's spec, its loader wrapped.

    None for every other module. Errors are those of the finders behind this one.
    """
    # Not disjoint: one was loaded without us, by a finder that answered before ours.
    if name in HOOKED or not sys.modules.keys().isdisjoint(waiting):
        if name.startswith("sglang_jitfix."):  # what is imported here
            return None
        try:
            from sglang_jitfix.on_sglang_import import loader
        except Exception:  # uninstalled since this process started
            return None
        return loader.find_spec(name, path, target)
    return None
