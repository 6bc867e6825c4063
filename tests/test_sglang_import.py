"""What the two hooks do when the real SGLang is imported."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from conftest import Fresh
from sglang_jitfix import DEBUG, LEGACY_ROOT, ROOT
from support import OFF, edited, environment, made_up_release, python, run

CACHE = "sglang.kernels.jit.utils.compile.cache"
PRINT_ROOT = f"import os; print('root', os.environ.get('{ROOT}', 'unset'))\n"
PATCHED = f"from {CACHE} import _to_entries; print('patched', type(_to_entries).__name__)\n"
WARNINGS = "import logging; logging.basicConfig(level='WARNING')\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with a link to a real folder."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    return tmp_path.resolve()


def said(code: str, folder: Path, given: str | None = None, **extra: str) -> tuple[list[str], str]:
    """What a fresh interpreter prints behind its marks, and its stderr."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(given, **extra),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    marks = ("root ", "patched ", "found ")
    return [line.split()[1] for line in done.stdout.splitlines() if line.startswith(marks)], (
        done.stderr
    )


def test_root_set_by_code_before_the_import(folder: Path) -> None:
    code = f"import os; os.environ['{ROOT}'] = 'link'; import sglang\n" + PRINT_ROOT
    assert said(code, folder)[0] == [f"{folder}/real"]
    assert said(code, folder, **OFF)[0] == ["link"]


def test_off_switch_set_by_code_before_the_import(folder: Path) -> None:
    code = "import os; os.environ['SGLANG_JITFIX_DISABLE'] = '1'\n" + PATCHED + PRINT_ROOT
    assert said(code, folder)[0] == ["function", "unset"]


def test_legacy_variable(folder: Path) -> None:
    """SGLang copies it over the new name in each process, so a child elsewhere sees it too."""
    child = "import sglang, os; print('found', os.environ['SGLANG_JIT_CACHE_DIR'])"
    code = "import os, subprocess, sys, sglang\n" + PRINT_ROOT
    elsewhere = f"os.chdir('/')\nsubprocess.run([sys.executable, '-c', {child!r}], check=True)"
    legacy = {LEGACY_ROOT: "link"}
    assert said(code + elsewhere, folder, **legacy)[0] == [f"{folder}/real"] * 2
    assert said(code, folder, **legacy, **OFF)[0] == ["link"]


UNCHANGED = f"""
import importlib, inspect, pickle, sys
from importlib.machinery import SourceFileLoader
from sglang.srt import environ
from {CACHE} import _to_entries as before
import {CACHE} as cache

for module in (environ, cache):
    assert type(module.__loader__) is type(module.__spec__.loader) is SourceFileLoader
assert pickle.loads(pickle.dumps(cache._to_entries)) is cache._to_entries
assert inspect.getsource(cache._to_entries).startswith("def _to_entries(")
assert inspect.signature(cache._to_entries) == inspect.signature(before.__wrapped__)
assert 'Content-addressed JIT build cache' in inspect.getsource(cache)
try:
    cache._to_entries(dependencies=[None], build_dir=cache.pathlib.Path("."))
except AttributeError as error:
    last = error.__traceback__
    while last.tb_next:
        last = last.tb_next
    assert last.tb_frame.f_code.co_filename == cache.__file__
importlib.reload(cache)
assert cache._to_entries is not before
print("patched", type(cache._to_entries).__name__)
import os
os.environ["{ROOT}"] = "link"
importlib.reload(environ)
print("root", os.environ["{ROOT}"])
"""


def test_modules_look_as_they_did_and_a_reload_is_hooked_again(folder: Path) -> None:
    assert said(UNCHANGED, folder)[0] == ["_Function", f"{folder}/real"]


def test_lowest_wrapt_that_is_declared(folder: Path, tmp_path: Path) -> None:
    """Tracing packages hold wrapt below 2; the newest one is what this environment has."""
    (bound,) = (
        need for need in metadata.requires("sglang-jitfix") or () if need.startswith("wrapt")
    )
    lowest = bound.replace(">=", "==") + ".0"
    run("uv", "pip", "install", "-q", "--target", tmp_path / "wrapt", lowest)
    code = UNCHANGED + "import wrapt; print('found', wrapt.__version__)"
    found = said(code, folder, PYTHONPATH=str(tmp_path / "wrapt"))[0]
    assert found == ["_Function", f"{folder}/real", lowest.partition("==")[2]]


FINDERS = {
    "that declines": """
class Competitor:
    def find_spec(self, name, path=None, target=None):
        return None
""",
    "that answers for SGLang itself": """
from importlib.machinery import PathFinder
class Competitor:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("sglang"):
            return PathFinder.find_spec(name, path, target)
""",
    "that asks all others, as wrapt's does": """
import importlib.util
class Competitor:
    busy = set()
    def find_spec(self, name, path=None, target=None):
        if name.startswith("sglang.") and name not in self.busy:
            self.busy.add(name)
            try:
                return importlib.util.find_spec(name)
            finally:
                self.busy.remove(name)
""",
}


@pytest.mark.parametrize(
    ("kind", "place"),
    [*((kind, "before") for kind in FINDERS), ("that asks all others, as wrapt's does", "behind")],
)
def test_competing_finder(folder: Path, kind: str, place: str) -> None:
    index = 0 if place == "before" else 1
    code = FINDERS[kind] + f"import sys; sys.meta_path.insert({index}, Competitor())\n"
    # Where a finder answers before ours is asked, ours catches up at the next import it sees.
    code += f"import {CACHE}, tabnanny\n"
    code += PATCHED + PRINT_ROOT
    home = {"HOME": f"{folder}/link"}
    assert said(code, folder, **home)[0] == ["_Function", f"{folder}/real/.cache/sglang/jit"]


def test_hook_that_fails_leaves_sglang_importable(folder: Path) -> None:
    code = WARNINGS + "import sys; sys.modules['wrapt'] = None\n" + PATCHED + PRINT_ROOT
    found, stderr = said(code, folder, HOME=f"{folder}/link")
    assert found == ["function", f"{folder}/real/.cache/sglang/jit"]
    assert stderr.count("not patched") == 1


def test_uninstalled_under_a_running_process(folder: Path, fresh: Fresh) -> None:
    """The finder stays, its package is gone: a module of the hooked name still imports."""
    (folder / "sglang/srt").mkdir(parents=True)
    (folder / "sglang/srt/environ.py").write_text("here = True\n")
    code = (
        "import os, shutil, sys, sglang_jitfix\n"
        "package = os.path.dirname(sglang_jitfix.__file__)\n"
        "os.rename(package, package + '-gone')\n"
        "try:\n"
        "    import sglang.srt.environ as environ\n"
        "finally:\n"
        "    os.rename(package + '-gone', package)\n"
        "print(environ.here)"
    )
    env = environment("link", PYTHONPATH=str(folder))
    assert python(code, env=env, cwd=folder, executable=fresh.with_shim) == "True\n"


PURGES = {
    "purged": "for name in [*sys.modules]:\n    if name.startswith('sglang'):\n"
    "        del sys.modules[name]\n",
    "loaded again": "import importlib, sglang_jitfix\nimportlib.reload(sglang_jitfix).init()\n",
}


@pytest.mark.parametrize("how", PURGES)
def test_start_up_module_that_is(folder: Path, how: str) -> None:
    """The finder on ``sys.meta_path`` is then no longer the module's in ``sys.modules``."""
    code = "import sys\n" + PURGES[how] + PATCHED + PRINT_ROOT
    found, stderr = said(code, folder, "link")
    assert found == ["_Function", f"{folder}/real"]
    assert "sglang_jitfix" not in stderr


# Another hook, which executes each module while it holds a lock of its own, and a second
# thread that imports a module while it holds that lock.
LOCKING = """
import sys, threading
from importlib.machinery import PathFinder

lock, begun = threading.RLock(), threading.Event()

class Loader:
    def __init__(self, loader):
        self.loader = loader
    def create_module(self, spec):
        return self.loader.create_module(spec)
    def exec_module(self, module):
        begun.set()
        with lock:
            self.loader.exec_module(module)

class Finder:
    def find_spec(self, name, path=None, target=None):
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin.endswith(".py") and threading.current_thread() is other:
            spec.loader = Loader(spec.loader)
        return spec

def imports():
    import sglang.srt.environ as environ
    print(environ.here)

import sglang.srt
sys.meta_path.insert(1, Finder())
other = threading.Thread(target=imports, daemon=True)
with lock:
    other.start()
    begun.wait()
    import this_one
other.join()
"""


def test_hook_that_holds_a_lock_while_a_module_is_executed(folder: Path, fresh: Fresh) -> None:
    (folder / "sglang/srt").mkdir(parents=True)
    (folder / "sglang/srt/environ.py").write_text("here = True\n")
    (folder / "this_one.py").touch()
    env = environment("link", PYTHONPATH=str(folder))
    said = python(LOCKING, env=env, cwd=folder, executable=fresh.with_shim)
    assert said == "True\n"


CHANGED_WRITERS = {
    "gone": ("_to_entries(", "_entries_of("),
    "with another signature": (
        "*, dependencies: Sequence[pathlib.Path], build_dir: pathlib.Path\n",
        "dependencies: Sequence[pathlib.Path], build_dir: pathlib.Path\n",
    ),
    "that takes more": (
        "*, dependencies: Sequence[pathlib.Path], build_dir: pathlib.Path\n",
        "*, dependencies, build_dir, strict=False\n",
    ),
}


@pytest.mark.parametrize("change", CHANGED_WRITERS)
def test_writer_that_is_not_the_one_known(folder: Path, tmp_path: Path, change: str) -> None:
    """Nothing is patched, one warning says so, and a default root is not guessed."""
    release = made_up_release(tmp_path / "made-up", "0.5.99", edited(*CHANGED_WRITERS[change]))
    code = WARNINGS + f"import {CACHE} as cache\n" + PRINT_ROOT
    code += "print('patched', any(type(v).__name__ == '_Function' for v in vars(cache).values()))"
    found, stderr = said(code, folder, PYTHONPATH=str(release))
    assert found == ["unset", "False"]
    assert stderr.count("left unpatched") == 1


def test_look_up_that_is_not_the_one_known(folder: Path, tmp_path: Path) -> None:
    """The writer is wrapped all the same, no look-up is, and one warning says so."""
    change = edited("def _refresh(\n", "def _refresh(\n    strict,\n")
    release = made_up_release(tmp_path / "made-up", "0.5.99", change)
    code = WARNINGS + f"import {CACHE} as cache\n"
    code += (
        "for k, v in vars(cache).items(): type(v).__name__ == '_Function' and print('patched', k)"
    )
    found, stderr = said(code, folder, PYTHONPATH=str(release))
    assert found == ["_to_entries"]
    assert stderr.count("left unpatched") == 1


def test_release_that_is_not_known(folder: Path, tmp_path: Path) -> None:
    """Its writer looks the same and is wrapped; its default root is left to it."""
    release = made_up_release(tmp_path / "made-up", "0.5.99")
    code = WARNINGS + PATCHED + PRINT_ROOT
    found, stderr = said(code, folder, PYTHONPATH=str(release), **{DEBUG: "1"})
    assert found == ["_Function", "unset"]
    assert "left unset, default of 0.5.99 not known" in stderr


STUBS = {
    "a mock": "from unittest.mock import MagicMock; stub = MagicMock()",
    "an object": "from types import SimpleNamespace; stub = SimpleNamespace()",
    "an empty module": "from types import ModuleType; stub = ModuleType('stub')",
    "another module": "import colorsys as stub",
}


@pytest.mark.parametrize("name", ["sglang.srt.environ", CACHE])
@pytest.mark.parametrize("stub", STUBS)
def test_stub_in_the_place_of_a_module(folder: Path, fresh: Fresh, stub: str, name: str) -> None:
    """As test suites and documentation builds put one there: imports go on, in silence but for
    one warning where the stub looks like a loaded module."""
    code = f"import sys\n{STUBS[stub]}\nsys.modules[{name!r}] = stub\nimport tabnanny, sched\n"
    done = subprocess.run(
        [fresh.with_shim, "-c", code + "print('found here')"],
        env=environment(folder / "real"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "found here\n")
    looks_loaded = stub == "another module" and name == CACHE
    assert len(done.stderr.splitlines()) == int(looks_loaded)


THREADS = """
import sys, threading, time, types
from importlib.machinery import ModuleSpec

# A module that is busy importing another one when SGLang's is asked for: what a slow
# disk does to any module that our hooks need.
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "logging":
            return ModuleSpec(name, self)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        started.set()
        time.sleep(0.5)
        import a_module_that_is_not_there_yet
started = threading.Event()
sys.meta_path.insert(0, Slow())
sys.modules.pop("logging", None)

def other():
    try:
        import logging
    except ImportError:
        pass
thread = threading.Thread(target=other, daemon=True)
thread.start()
started.wait()
import sglang.srt.environ
thread.join()
print("found both")
"""


def test_threads_that_import_at_once(folder: Path, fresh: Fresh) -> None:
    """importlib asks finders with the interpreter-wide import lock held: one that imports
    something itself can wait there for ever. (The module of SGLang's name is a stand-in.)"""
    (folder / "sglang/srt").mkdir(parents=True)
    (folder / "sglang/srt/environ.py").write_text("")
    env = environment("link", PYTHONPATH=str(folder))
    done = subprocess.run(
        [fresh.with_shim, "-c", THREADS],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "found both\n"), done.stderr
