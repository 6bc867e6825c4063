"""What runs at every interpreter start of this environment: this file and nothing else.

``sglang_jitfix.pth`` calls :func:`init`. It gives ``SGLANG_JIT_CACHE_DIR`` its
canonical spelling and puts one finder on ``sys.meta_path``; the package's other
modules are imported only when SGLang itself is, or by the command line.
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
    from typing import Any

ROOT = "SGLANG_JIT_CACHE_DIR"
# SGLang copies each SGL_* variable over its SGLANG_* name in every process that
# imports it, so a child would get the old spelling back if this one kept it.
LEGACY_ROOT = "SGL_JIT_CACHE_DIR"
DISABLE = "SGLANG_JITFIX_DISABLE"
DEBUG = "SGLANG_JITFIX_DEBUG"

# The two variables as init() found them, for `sglang-jitfix doctor`; empty until it runs.
found_at_start: "dict[str, str | None]" = {}

# The modules of SGLang that we hook, and those of them whose hook has not run yet.
HOOKED = {"sglang.srt.environ", "sglang.kernels.jit.utils.compile.cache"}
waiting = set(HOOKED)


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
    # answer for good. For all other modules ours declines.
    sys.meta_path.insert(0, Finder())


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


class Finder:
    """Meta path finder that adds :class:`HookLoader` to two modules of SGLang."""

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """The spec of a hooked module as the finders behind this one give it, its loader wrapped.

        None for every other module, but for the next one after a hook was missed. Errors
        are those of the other finders.
        """
        # Nothing is imported in here: importlib holds the interpreter-wide import lock,
        # for which a thread that imports the same module may be waiting.
        if name not in HOOKED and not missed_hooks():
            return None
        # The finders before us have declined already; asking them again could recurse.
        others = sys.meta_path
        if self in others:
            others = others[others.index(self) + 1 :]
        for finder in others:
            find_spec = getattr(finder, "find_spec", None)  # importlib tolerates its absence
            spec: ModuleSpec | None = find_spec and find_spec(name, path, target)
            if spec is not None:
                # A namespace package or a loader older than PEP 451 is left alone.
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = HookLoader(spec.loader)  # type: ignore[assignment]
                return spec
        return None


def missed_hooks() -> "list[str]":
    """The hooked modules that were loaded without us, by a finder that answered before ours.

    The next module that we are asked for runs their hooks. One set operation an import.
    """
    if sys.modules.keys().isdisjoint(waiting):
        return []
    loaded = [(name, getattr(sys.modules.get(name), "__spec__", None)) for name in tuple(waiting)]
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
            from sglang_jitfix import on_sglang_import

            on_sglang_import.run_hooks(module)
        except Exception:  # uninstalled since this process started
            pass
