"""What the tests share: environments, fresh interpreters, probe processes, manifests."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sglang_jitfix import DEBUG, DISABLE, ROOT

Root = str | os.PathLike[str] | None

OFF = {DISABLE: "1"}
SHIM: dict[str, dict[str, str]] = {"on": {}, "off": OFF}


REPOSITORY = Path(__file__).parents[1]


def interpreters() -> dict[str, str]:
    """The CPythons from 3.10 on that this machine has, the running one included, by version:
    ``3.11``, and ``3.11-debug`` for a debug build."""
    found = {f"{sys.version_info.major}.{sys.version_info.minor}": sys.executable}
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    for version in (f"3.{minor}" for minor in range(10, 20)):
        places = sorted(pyenv.glob(f"versions/{version}*/bin/python{version}"))
        for place in [shutil.which(f"python{version}"), *places]:
            # A launcher may be on PATH without the version it is named for.
            works = place and subprocess.run([place, "-c", ""], capture_output=True).returncode == 0
            if works:
                found.setdefault(version, str(place))
        debug = shutil.which(f"python{version}-dbg")  # Debian's name of it
        if debug:
            found[f"{version}-debug"] = debug
    return found


def run(*command: str | Path, **options: Any) -> str:
    """The output of *command*, both streams; it must exit 0. *options* are subprocess's."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, **{"env": environment(), **streams, **options})
    out = str(done.stdout, errors="replace")
    assert done.returncode == 0, out
    return out


def new_environment(folder: Path, base: str = sys.executable, pip: bool = False) -> Path:
    """Make a virtual environment at *folder* for the interpreter *base*; its interpreter."""
    seeds = [] if pip else ["--no-seed"]
    run(sys.executable, "-m", "virtualenv", "-q", "--no-download", "-p", base, *seeds, folder)
    return folder / "bin" / "python"


def site_packages(interpreter: Path) -> Path:
    """The site-packages folder of *interpreter*."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(run(interpreter, "-c", code).strip())


def environment(root: Root = None, shim: str = "on", **extra: str) -> dict[str, str]:
    """This process's environment less SGLang's and our settings, with *root* as cache root."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SGLANG_", "SGL_", "COV_"))
    }
    # Without bytecode on disk each `import sglang` takes twice as long.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    # The environment's own bin folder first: SGLang looks up ninja on PATH.
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    if root is not None:
        env[ROOT] = os.fspath(root)
    return {**env, **SHIM[shim], **extra}


def python(
    code: str,
    *args: str,
    env: Mapping[str, str],
    cwd: Path | None = None,
    executable: str | Path = sys.executable,
    options: tuple[str, ...] = (),
) -> str:
    """What a fresh interpreter that runs *code* prints; it must exit 0 and be silent on stderr
    unless ``SGLANG_JITFIX_DEBUG`` is set or SGLang is loaded."""
    done = subprocess.run(
        [executable, *options, "-c", code, *args],
        env=dict(env),
        cwd=cwd,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if DEBUG not in env and "sglang." not in code:
        assert done.stderr == ""
    return done.stdout


def start_probe(source: Path, env: Mapping[str, str], cwd: Path) -> subprocess.Popen[str]:
    """A fresh process that loads the module once, as `sglang-jitfix verify` does."""
    return subprocess.Popen(
        [sys.executable, "-m", "sglang_jitfix.cli.probe", str(source)],
        env=dict(env),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="surrogateescape",
    )


def finish_probe(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The report of a probe process, which must succeed; ended here whatever happens."""
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, err
    report: dict[str, Any] = json.loads(out.splitlines()[-1])
    return report


def load_once(source: Path, env: Mapping[str, str], cwd: Path) -> dict[str, Any]:
    """The report of one fresh probe process."""
    return finish_probe(start_probe(source, env, cwd))


def manifests(root: Path) -> dict[Path, list[list[str]]]:
    """Every dependency manifest below *root*, decoded."""
    return {path: json.loads(path.read_bytes()) for path in sorted(root.rglob("sgl_deps.json"))}


def staging_entries(root: Path) -> list[str]:
    """The manifest entries below *root* that name a staging folder."""
    return [
        entry[1]
        for entries in manifests(root).values()
        for entry in entries
        if re.search(r"/\.staging-[0-9a-f]{32}/", entry[1])
    ]


def made_up_release(
    folder: Path, version: str, edits: Mapping[str, Callable[[str], str]] | None = None
) -> Path:
    """A stand-in for a release that does not exist: the installed SGLang as a tree of links
    below *folder*, with another version and the files named in *edits* rewritten. To be put
    on PYTHONPATH."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.origin is not None
    original = Path(spec.origin).parent
    changes = {"_version.py": lambda text: f"{text}\n__version__ = {version!r}\n", **(edits or {})}
    copied = {parent for name in changes for parent in Path(name).parents}
    for parent in sorted(copied):
        (folder / "sglang" / parent).mkdir(parents=True)
        for entry in (original / parent).iterdir():
            if entry.name != "__pycache__" and parent / entry.name not in copied:
                (folder / "sglang" / parent / entry.name).symlink_to(entry)
    for name, edit in changes.items():
        copy = folder / "sglang" / name
        copy.unlink()
        copy.write_text(edit((original / name).read_text()))
    return folder


def edited(old: str, new: str) -> dict[str, Callable[[str], str]]:
    """Edits of a made-up release: *old* replaced by *new* in SGLang's cache module."""
    name = "kernels/jit/utils/compile/cache.py"

    def edit(text: str) -> str:
        assert old in text
        return text.replace(old, new)

    return {name: edit}
