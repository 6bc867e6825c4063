"""The package in fresh environments: installed, asked, uninstalled."""

from __future__ import annotations

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


def install(tool: str, python_: Path, *what: str | Path) -> None:
    if tool == "pip":
        run(python_, "-m", "pip", "install", "-q", "--no-input", *what)
    else:
        run("uv", "pip", "install", "-q", "--python", python_, *what)


def uninstall(tool: str, python_: Path) -> None:
    if tool == "pip":
        run(python_, "-m", "pip", "uninstall", "-q", "-y", "sglang-jitfix")
    else:
        run("uv", "pip", "uninstall", "-q", "--python", python_, "sglang-jitfix")


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
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    env = environment("link")
    real = tmp_path.resolve() / "real"
    assert python(STATE, env=env, cwd=tmp_path, executable=python_) == f"{real} True False\n"
    off = {**env, DISABLE: "1"}
    assert python(STATE, env=off, cwd=tmp_path, executable=python_) == "link True False\n"
    assert "on: " in run(python_.parent / "sglang-jitfix", "doctor")

    uninstall(tool, python_)
    # An interpreter that runs in between leaves bytecode of other packages behind.
    left = {name for name in contents(site) - before if "__pycache__" not in name}
    assert left == set()
    assert not list(site.glob("**/sglang_jitfix*"))
    assert not (python_.parent / "sglang-jitfix").exists()
    assert python(STATE, env=env, cwd=tmp_path, executable=python_) == "link False False\n"


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
