"""Unusual interpreters: zip archives, subinterpreters, threads and gevent, on each CPython.

``sglang`` is a stand-in here, a few small files: the real one runs on one version only.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from conftest import Fresh
from sglang_jitfix import DEBUG, ROOT
from support import environment, run

CACHE = "sglang.kernels.jit.utils.compile.cache"
ENVIRON = "sglang.srt.environ"
GEVENT = "gevent==26.9.0"

# SGLang's cache module imports the other one too. The sleeps let all threads meet.
STAND_IN = {
    ENVIRON: "import time\ntime.sleep(0.05)\n",
    CACHE: (
        f"import time\nimport {ENVIRON}\ntime.sleep(0.05)\n"
        "def _to_entries(*, dependencies, build_dir):\n    return build_dir\n"
        "def _read_deps(leaf): pass\n"
        "def _refresh(entries): pass\n"
        "def find_prebuilt(*, scope, module_name): pass\n"
        "def _resolve_path(*, root, relpath): pass\n"
        "def _deps_key(entries): pass\n"
        "def compute_build_key(spec, *, build_file): pass\n"
    ),
}
# A process that says whether both hooks have run, and how often the writer is wrapped.
LOAD = f"import {CACHE}, {ENVIRON}\n"
SAY = f"""
import inspect, os, sys
writer = sys.modules["{CACHE}"]._to_entries
print(os.environ["{ROOT}"], type(writer).__name__, type(writer.__wrapped__).__name__)
assert "return build_dir" in inspect.getsource(writer)
"""
PATCHED = "_Function function\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a link in it, and a stand-in SGLang in its folder ``packages``."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for name, text in STAND_IN.items():
        file = tmp_path / "packages" / f"{name.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path.resolve()


def quiet(python: Path, folder: Path, *command: str | Path, packages: Path | str = "") -> str:
    """What *python* prints in *folder* with *packages* on its path, the stand-in by default;
    any warning is an error, and stderr must stay empty."""
    done = subprocess.run(
        [python, "-Werror", *command],
        env=environment("link", PYTHONPATH=str(packages or folder / "packages")),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_sglang_in_a_zip_archive(fresh: Fresh, folder: Path) -> None:
    archive = shutil.make_archive(str(folder / "sglang"), "zip", folder / "packages")
    code = LOAD + SAY + f"print(type({CACHE}.__loader__).__name__, type({CACHE}.__spec__.loader))"
    out = quiet(fresh.with_shim, folder, "-Xdev", "-c", code, packages=archive)
    loaders = "zipimporter <class 'zipimport.zipimporter'>\n"
    assert out == f"{folder}/real {PATCHED}{loaders}"


def test_the_package_itself_in_a_zip_archive(fresh: Fresh, folder: Path, wheel: Path) -> None:
    """A zip archive has no start-up file that ``site`` reads: who ships one calls init()."""
    code = "import sglang_jitfix; assert '.whl' in sglang_jitfix.__file__; sglang_jitfix.init()\n"
    code += f"import os; print(os.environ['{ROOT}'])"
    assert quiet(fresh.bare, folder, "-c", code, packages=wheel) == f"{folder}/real\n"


SUBINTERPRETER = f"""
import os, sys, textwrap
if sys.version_info >= (3, 14):
    from concurrent import interpreters
    new = interpreters.create
    def execute(interpreter, code): interpreter.exec(code)
elif sys.version_info >= (3, 13):
    import _interpreters
    new = _interpreters.create
    def execute(interpreter, code):
        failure = _interpreters.exec(interpreter, code)
        assert failure is None, failure
else:
    import _xxsubinterpreters
    new = _xxsubinterpreters.create
    execute = _xxsubinterpreters.run_string

# Set too late for this interpreter's start, but not for that of the next ones.
os.environ["{ROOT}"] = "link"
for _ in range(2):
    execute(new(), sys.argv[1])
print("left", os.environ["{ROOT}"])
"""


def test_subinterpreters(fresh: Fresh, folder: Path) -> None:
    """Each is started, and hooked, like an interpreter of its own. Not with the hook that
    wants wrapt: importing wrapt in two of them ends CPython 3.12.1, and torch needs the main one.
    """
    show = f"print(os.environ['{ROOT}'], flush=True)\n"
    inside = f"import os\n{show}os.environ['{ROOT}'] = 'link'\nimport {ENVIRON}\n{show}"
    out = quiet(fresh.with_shim, folder, "-c", SUBINTERPRETER, inside)
    assert out == f"{folder}/real\n" * 4 + "left link\n"


THREADS = f"""
import importlib, os, sys, threading
os.environ["{ROOT}"] = "link"
names = ["{CACHE}", "{ENVIRON}", "decimal", "sqlite3.dump"] * 8
together = threading.Barrier(len(names))
def load(name):
    together.wait()
    importlib.import_module(name)
threads = [threading.Thread(target=load, args=(name,)) for name in names]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def test_threads_that_import_at_once(fresh: Fresh, folder: Path) -> None:
    """No deadlock, and each hook has run once."""
    done = subprocess.run(
        [fresh.with_shim, "-c", THREADS + SAY],
        env=environment(None, PYTHONPATH=str(folder / "packages"), **{DEBUG: "1"}),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{folder}/real {PATCHED}"
    said = [line.partition(": ")[2] for line in done.stderr.splitlines()]
    wrapped = ("_read_deps", "_refresh", "_to_entries", "find_prebuilt")
    patched = [f"patched {CACHE}.{name}" for name in wrapped]
    assert sorted(said) == [f"{ROOT}: 'link' -> '{folder}/real'", *patched]


# Another thread is importing a module that the shim needs when SGLang is asked for.
MEETING = f"""
import sys, threading, time
from importlib.machinery import PathFinder

inside, asked = threading.Event(), threading.Event()

class Meeting:
    def find_spec(self, name, path=None, target=None):
        if name == "{CACHE}":
            asked.set()
        if name == "logging":
            spec = PathFinder.find_spec(name, path)
            execute = spec.loader.exec_module
            def exec_module(module):
                inside.set()
                asked.wait()
                time.sleep(0.5)  # for the other thread to come past here and into our finder
                import decimal  # wants the interpreter-wide import lock
                execute(module)
            spec.loader.exec_module = exec_module
            return spec

assert "logging" not in sys.modules and "decimal" not in sys.modules
sys.meta_path.insert(0, Meeting())
other = threading.Thread(target=__import__, args=("logging",))
other.start()
inside.wait()
import {CACHE}
other.join()
"""


def test_thread_that_imports_what_the_hooks_need(fresh: Fresh, folder: Path) -> None:
    """Each would wait for the other's lock if our finder imported under importlib's own."""
    out = quiet(fresh.with_shim, folder, "-c", MEETING + SAY)
    assert out == f"{folder}/real {PATCHED}"


@pytest.fixture(scope="module")
def gevent(fresh: Fresh, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with gevent for the interpreter of *fresh*."""
    folder = tmp_path_factory.mktemp("gevent")
    run("uv", "pip", "install", "-q", "--python", fresh.with_shim, "--target", folder, GEVENT)
    return folder


@pytest.mark.parametrize("how", ["python -m gevent.monkey", "patch_all() first"])
def test_gevent_patches_early(fresh: Fresh, folder: Path, gevent: Path, how: str) -> None:
    """With gevent's own locks and threads in place of Python's, and greenlets that import."""
    script = folder / "script.py"
    patch = "" if how.startswith("python") else "import gevent.monkey; gevent.monkey.patch_all()\n"
    check = "from gevent.monkey import is_module_patched\nassert is_module_patched('threading')\n"
    script.write_text(patch + check + THREADS + SAY)
    command: list[str | Path] = [script] if patch else ["-m", "gevent.monkey", script]
    path = f"{gevent}:{folder / 'packages'}"
    done = subprocess.run(
        [fresh.with_shim, *command],
        env=environment("link", PYTHONPATH=path),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{folder}/real {PATCHED}"
