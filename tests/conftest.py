"""Fixtures of all tests, and the check that runs after every one of them."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

import stack
from cachekit import built  # noqa: F401 - a fixture
from sglang_jitfix.cli import probe
from support import REPOSITORY, interpreters, new_environment, run, site_packages

# Why a test may be skipped where CI is set; everything else can run there.
SKIPS = ("no CUDA device",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of few test functions first: they take longest, and all workers should end together."""
    functions = {(item.path, getattr(item, "originalname", item.name)) for item in items}
    count = Counter(path for path, _ in functions)
    items.sort(key=lambda item: (count[item.path], item.path))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a skip counts as a failure unless the hardware is missing."""
    report = yield
    if report.skipped and os.environ.get("CI") and not hasattr(report, "wasxfail"):
        assert isinstance(report.longrepr, tuple)
        reason = str(report.longrepr[2]).removeprefix("Skipped: ")
        if not reason.startswith(SKIPS):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} was skipped, which CI does not allow: {reason}"
    return report


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Fail the test that changes this process's environment or leaves a child process."""
    before = _variables()
    running = psutil.Process().children()  # servers that several tests share
    yield
    after = _variables()
    left = [child for child in psutil.Process().children() if child not in running]
    left += [below for child in left for below in child.children(recursive=True)]
    for process in left:
        process.kill()
    psutil.wait_procs(left)
    os.environ.update(before)
    for name in after.keys() - before.keys():
        del os.environ[name]
    assert after == before, "the test leaks environment variables"
    assert not left, f"the test leaves processes behind: {left}"


def _variables() -> dict[str, str]:
    # pytest itself changes this one as a test goes on.
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    build = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder)
    run(*build, cwd=REPOSITORY)
    (path,) = folder.glob("*.whl")
    return path


@dataclass(frozen=True)
class Fresh:
    """Two new virtual environments of one CPython: with the wheel, and with an empty .pth file."""

    with_shim: Path
    bare: Path


@pytest.fixture(scope="session", params=interpreters())
def fresh(
    request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> Fresh:
    """The interpreters of two new environments, for each CPython that this machine has."""
    folder = tmp_path_factory.mktemp(f"fresh-{request.param}")
    base = interpreters()[request.param]
    pair = Fresh(new_environment(folder / "shim", base), new_environment(folder / "bare", base))
    run("uv", "pip", "install", "-q", "--python", pair.with_shim, wheel)
    # A comment, because Python 3.13 loads a codec to read any line at all.
    (site_packages(pair.bare) / "empty.pth").write_text("#\n")
    return pair


@pytest.fixture(scope="session")
def cpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[stack.Cpu]:
    """What SGLang's whole stack needs to run on the CPU."""
    before = stack.load_snapshots()
    yield stack.lay_out(tmp_path_factory.mktemp("cpu"))
    stack.remove_load_snapshots(before)


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C++ file of the module that the probe processes load."""
    path = tmp_path_factory.mktemp("source") / "probe.cpp"
    path.write_text(probe.SOURCE)
    return path
