"""The package in fresh environments: installed, asked, uninstalled."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest

from sglang_jitfix import DISABLE, ROOT
from support import (
    REPOSITORY,
    environment,
    interpreters,
    new_environment,
    python,
    run,
    site_packages,
)

LINE = "import sglang_jitfix; sglang_jitfix.init()\n"
STATE = (
    f"import os, sys; print(os.environ.get('{ROOT}'),"
    " 'sglang_jitfix' in sys.modules, 'wrapt' in sys.modules)"
)


def contents(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_wheel_holds_the_package_and_the_start_up_file_only(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert archive.read("sglang_jitfix.pth").decode() == LINE
        (metadata,) = (name for name in names if name.endswith("METADATA"))
        wants = [
            line
            for line in archive.read(metadata).decode().splitlines()
            if line.startswith("Requires-Dist") and "extra ==" not in line
        ]
    assert len(wants) == 1
    assert wants[0].startswith("Requires-Dist: wrapt")
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"sglang_jitfix", "sglang_jitfix.pth"}
    package = REPOSITORY / "sglang_jitfix"
    sources = {str(path.relative_to(REPOSITORY)) for path in package.rglob("*.py")}
    assert sources <= set(names)


def install(tool: str, python_: Path, *what: str | Path, **extra: str) -> None:
    if tool == "pip":
        run(python_, "-m", "pip", "install", "-q", "--no-input", *what)
    else:
        command = ("uv", "pip", "install", "-q", "--python", python_, *what)
        run(*command, env=environment(None, **extra))


def uninstall(tool: str, python_: Path) -> None:
    if tool == "pip":
        run(python_, "-m", "pip", "uninstall", "-q", "-y", "sglang-jitfix")
    else:
        run("uv", "pip", "uninstall", "-q", "--python", python_, "sglang-jitfix")


def check_works(python_: Path, folder: Path) -> None:
    """The shim runs in *python_*, tried in *folder*, and its off switch and doctor do as well."""
    (folder / "real").mkdir()
    (folder / "link").symlink_to("real")
    env = environment("link")
    real = folder.resolve() / "real"
    assert python(STATE, env=env, cwd=folder, executable=python_) == f"{real} True False\n"
    off = {**env, DISABLE: "1"}
    assert python(STATE, env=off, cwd=folder, executable=python_) == "link True False\n"
    report = json.loads(run(python_.parent / "sglang-jitfix", "doctor", "--json"))
    assert report["on"] is True
    assert report["startup_file"] == str(site_packages(python_) / "sglang_jitfix.pth")


def check_gone(python_: Path, before: set[str]) -> None:
    """Nothing of the package is left in the site-packages of *python_*, which held *before*."""
    site = site_packages(python_)
    # An interpreter that runs in between leaves bytecode of other packages behind.
    left = {name for name in contents(site) - before if "__pycache__" not in name}
    assert left == set()
    assert not list(site.glob("**/sglang_jitfix*"))
    assert not (python_.parent / "sglang-jitfix").exists()
    assert python(STATE, env=environment("link"), executable=python_) == "link False False\n"


@pytest.mark.parametrize("tool", ["pip", "uv"])
@pytest.mark.parametrize("kind", ["wheel", "editable"])
@pytest.mark.parametrize("version", interpreters())
def test_install_and_uninstall(
    tmp_path: Path, wheel: Path, tool: str, kind: str, version: str
) -> None:
    """Works from the first start after the install; the uninstall leaves nothing behind."""
    python_ = new_environment(tmp_path / "env", interpreters()[version], pip=tool == "pip")
    site = site_packages(python_)
    install(tool, python_, "wrapt")
    before = contents(site)
    install(tool, python_, *(["-e", REPOSITORY] if kind == "editable" else [wheel]))
    assert (site / "sglang_jitfix.pth").read_text() == LINE
    assert (site / "sglang_jitfix").is_dir() == (kind == "wheel")
    check_works(python_, tmp_path)
    uninstall(tool, python_)
    check_gone(python_, before)


@pytest.mark.parametrize("version", interpreters())
def test_links_into_the_cache_of_uv(tmp_path: Path, wheel: Path, version: str) -> None:
    """Each file of site-packages is a link. pip and uv remove the links alone, and a cache that
    is removed breaks no interpreter."""
    python_ = new_environment(tmp_path / "env", interpreters()[version], pip=True)
    site = site_packages(python_)
    before = contents(site)
    cache = tmp_path / "cache"
    links = {"UV_LINK_MODE": "symlink", "UV_CACHE_DIR": str(cache)}
    install("uv", python_, "--no-deps", wheel, **links)
    cached = {path: path.read_bytes() for path in cache.rglob("*") if path.is_file()}
    for name in ("sglang_jitfix.pth", "sglang_jitfix/__init__.py"):
        assert (site / name).is_symlink()
        assert (site / name).resolve() in cached
    check_works(python_, tmp_path)
    for tool in ("pip", "uv"):
        uninstall(tool, python_)
        check_gone(python_, before)
        assert {path: path.read_bytes() for path in cached} == cached
        install("uv", python_, "--no-deps", wheel, **links)
        assert python(STATE, env=environment(), executable=python_) == "None True False\n"
    shutil.rmtree(cache)
    assert python(STATE, env=environment(), executable=python_) == "None False False\n"


def test_reinstall_over_itself(tmp_path: Path, wheel: Path) -> None:
    python_ = new_environment(tmp_path / "env", pip=True)
    for tool in ("pip", "uv", "pip"):
        flag = "--force-reinstall" if tool == "pip" else "--reinstall"
        install(tool, python_, flag, wheel)
        assert python(STATE, env=environment(), executable=python_) == "None True False\n"
    uninstall("pip", python_)
    assert python(STATE, env=environment(), executable=python_) == "None False False\n"


def test_read_only_site_packages_without_bytecode(tmp_path: Path, wheel: Path) -> None:
    """As in a container image whose layers are read-only: silent, and nothing is written."""
    python_ = new_environment(tmp_path / "env")
    install("uv", python_, wheel)
    site = site_packages(python_)
    before = contents(site)
    env = {**environment(), "PYTHONDONTWRITEBYTECODE": "1"}
    for folder in (site, site / "sglang_jitfix"):
        folder.chmod(0o555)
    try:
        assert python(STATE, env=env, executable=python_) == "None True False\n"
        assert contents(site) == before
    finally:
        for folder in (site, site / "sglang_jitfix"):
            folder.chmod(0o755)
    # The remedy in the README.
    install("uv", python_, "--reinstall", "--compile-bytecode", wheel)
    assert list(site.glob("sglang_jitfix/__pycache__/__init__.*.pyc"))
