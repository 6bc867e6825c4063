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

ROOT = "SGLANG_JIT_CACHE_DIR"
# SGLang copies each SGL_* variable over its SGLANG_* name in every process that
# imports it, so a child would get the old spelling back if this one kept it.
LEGACY_ROOT = "SGL_JIT_CACHE_DIR"
DISABLE = "SGLANG_JITFIX_DISABLE"
DEBUG = "SGLANG_JITFIX_DEBUG"

# The two variables as the first init() found them, for `sglang-jitfix doctor`.
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

    for name in (ROOT, LEGACY_ROOT):
        found_at_start.setdefault(name, os.environ.get(name))
    if is_set(DISABLE):
        debug(f"off: {DISABLE} is set")
        return
    normalise_environment()
    for finder in sys.meta_path:
        if type(finder) is Finder:
            return
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
    """Meta path finder that has a hook run after each of two modules of SGLang."""

    busy = False

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """None for every module but those two; see ``on_sglang_import/loader.py`` for them."""
        # Also if a hooked module has been imported without us being asked, because a
        # finder before ours answered: one set operation an import.
        if name not in HOOKED and (self.busy or sys.modules.keys().isdisjoint(waiting)):
            return None
        # importlib asks finders with the interpreter-wide import lock held. An import in
        # here would wait for ever for a thread that holds that module's own lock and
        # wants the wide one, so we let go of it, however deep it is held.
        import _imp

        held = 0
        try:
            while True:
                _imp.release_lock()
                held += 1
        except RuntimeError:  # not ours, or not ours any more
            pass
        try:
            self.busy = True  # what the next import imports comes past here as well
            try:
                from sglang_jitfix.on_sglang_import import loader
            except Exception:  # uninstalled since this process started
                return None
            finally:
                self.busy = False
            return loader.find_spec(self, name, path, target)
        finally:
            for _ in range(held):
                _imp.acquire_lock()
