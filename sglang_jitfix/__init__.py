"""What runs at every interpreter start of this environment: this file and nothing else.

``sglang_jitfix.pth`` calls :func:`init`. It gives ``SGLANG_JIT_CACHE_DIR`` its
canonical spelling and puts one finder on ``sys.meta_path``; the package's other
modules are imported only when SGLang itself is, or by the command line.
"""

# Both are loaded by the interpreter before any .pth file: nothing is imported here.
import os
import sys

# What typing.TYPE_CHECKING is to a type checker, without importing typing.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

ROOT = "SGLANG_JIT_CACHE_DIR"
# SGLang copies each SGL_* variable over its SGLANG_* name in every process that
# imports it, so a child would get the old spelling back if this one kept it.
LEGACY_ROOT = "SGL_JIT_CACHE_DIR"
DISABLE = "SGLANG_JITFIX_DISABLE"
DEBUG = "SGLANG_JITFIX_DEBUG"

# SGLang's module -> ours, whose run() is called with it once it has been executed.
HOOKS = {
    "sglang.srt.environ": "sglang_jitfix.on_sglang_import.environ",
    "sglang.kernels.jit.utils.compile.cache": "sglang_jitfix.on_sglang_import.cache",
}

# The two variables as init() found them, for `sglang-jitfix doctor`; None until
# init() has run.
found_at_start: "dict[str, str | None] | None" = None

# Modules whose hook has not run yet.
_waiting = set(HOOKS)


def init() -> None:
    """Normalise the cache root and watch for SGLang's import.

    Takes and returns nothing, raises nothing, prints nothing unless
    ``SGLANG_JITFIX_DEBUG`` is set. A second call changes nothing: before
    Python 3.13 ``site`` reads a virtual environment's ``.pth`` files twice.
    """
    global found_at_start
    if found_at_start is None:
        found_at_start = {name: os.environ.get(name) for name in (ROOT, LEGACY_ROOT)}
    if is_set(DISABLE):
        debug(f"off: {DISABLE} is set")
        return
    normalise_environment()
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        # First, because the finders that do the work (PathFinder, editable
        # installs) answer for good. For all other modules ours declines.
        sys.meta_path.insert(0, Finder())


def is_set(name: str) -> bool:
    """Whether the environment variable *name* is anything but empty, 0, false, no, n or off."""
    value = os.environ.get(name, "").strip().lower()
    return value not in ("", "0", "false", "no", "n", "off")


def debug(message: str) -> None:
    """Write *message* and the pid as one ASCII line to stderr if ``SGLANG_JITFIX_DEBUG`` is set."""
    if is_set(DEBUG) and sys.stderr is not None:  # print(file=None) would write to stdout
        try:
            print(f"sglang-jitfix[{os.getpid()}]: {message}", file=sys.stderr)
        except Exception:  # a closed stderr is no reason to fail
            pass


def normalise_environment() -> None:
    """Give the cache-root variables that are set and not empty their canonical spelling."""
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
        """The spec of *name* as the finders behind this one give it, its loader wrapped.

        None for every module but SGLang's two. Errors are those of the other finders.
        """
        # A finder that got in before ours may have answered for SGLang: catch up
        # at the next import it leaves to us. One set operation an import.
        if not sys.modules.keys().isdisjoint(_waiting):
            _run_missed_hooks()
        if name not in HOOKS:
            return None
        # Those before us have declined already; asking them again could recurse.
        others = sys.meta_path
        if self in others:
            others = others[others.index(self) + 1 :]
        for finder in others:
            find_spec = getattr(finder, "find_spec", None)  # importlib tolerates its absence
            spec: ModuleSpec | None = find_spec and find_spec(name, path, target)
            if spec is not None:
                # A namespace or a pre-PEP 451 loader: not the module we know.
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = HookLoader(spec.loader)  # type: ignore[assignment]
                return spec
        return None


class HookLoader:
    """Loader that executes the module with its own loader, then runs our hook."""

    def __init__(self, loader: "Loader | None") -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> "Any":
        # create_module, get_code, get_source, ...: all the real loader's.
        return getattr(self.loader, name)

    def exec_module(self, module: "ModuleType") -> None:
        """Execute *module*; raises what its own loader raises."""
        # From here on inspect, pickle and pkgutil see what they would without us.
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        assert self.loader is not None
        self.loader.exec_module(module)
        _run_hook(module)


def _run_missed_hooks() -> None:
    for name in tuple(_waiting):
        module = sys.modules.get(name)
        # importlib sets _initializing while a module executes: too early then.
        if module and not getattr(module.__spec__, "_initializing", False):
            _run_hook(module)


def _run_hook(module: "ModuleType") -> None:
    _waiting.discard(module.__name__)
    if is_set(DISABLE):  # set by code since the start
        return
    try:
        hook = HOOKS[module.__name__]
        __import__(hook)
        sys.modules[hook].run(module)
    except Exception as error:  # an import of SGLang never fails because of us
        import logging

        logging.getLogger(__name__).warning("%s not patched: %r", module.__name__, error)
