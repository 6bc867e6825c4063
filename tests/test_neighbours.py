"""The real SGLang with the shim beside other packages that watch imports or executions.

Each scenario is one process: the neighbour starts before the shim or after it, SGLang is
imported, a module is built through a linked home, and the process is asked what it sees.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support import environment, new_environment, run, site_packages, staging_entries

PACKAGES = [
    "autowrapt==2.0.0",
    "beartype==0.23.1",
    "coverage==7.17.3",
    "ddtrace==4.16.0",
    "debugpy==1.8.22",
    "jaxtyping==0.3.11",
    "setuptools==84.2.1",
    "typeguard==4.6.0",
]
ANSWERS = Path(__file__).with_name("sglang_answers.py")

CACHE = "sglang.kernels.jit.utils.compile.cache"
# Of all of "sglang" only typeguard can: the others' checks fail without the shim as well.
HOOKED = ["sglang.srt.environ", CACHE]
BEARTYPE = f"from beartype.claw import beartype_packages; beartype_packages({HOOKED})"
TYPEGUARD = "from typeguard import install_import_hook; install_import_hook('sglang')"
JAXTYPING = (
    f"from jaxtyping import install_import_hook; install_import_hook({HOOKED}, 'beartype.beartype')"
)
# What a Datadog product does: a callback after the import, and a look at the code before it.
DDTRACE_PRODUCT = f"""
import sys
from ddtrace.internal.module import BaseModuleWatchdog
sys.said = said = []
class Product(BaseModuleWatchdog):
    def after_import(self, module):
        if module.__name__ in {HOOKED}:
            said.append("imported " + module.__name__)
    def transform(self, code, module):
        if module.__name__ in {HOOKED}:
            said.append("code of " + module.__name__)
        return code
Product.install()
"""
# autowrapt puts wrapt's finder first on sys.meta_path once sitecustomize has run; BEHIND, a
# sitecustomize, has it do so sooner and moves it. HOOKS is a distribution that uses autowrapt.
AUTOWRAPT = {"AUTOWRAPT_BOOTSTRAP": "test_neighbours"}
BEHIND = """
import sys
from autowrapt.bootstrap import register_bootstrap_functions
register_bootstrap_functions()
sys.meta_path.insert(1, sys.meta_path.pop(0))
"""
HOOKS = {
    "hooks.py": """
import sys
sys.said = said = []
def imported(module):
    said.append("imported " + module.__name__)
""",
    "hooks-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: hooks\nVersion: 1\n",
    "hooks-1.dist-info/entry_points.txt": f"""
[test_neighbours]
{HOOKED[0]} = hooks:imported
{HOOKED[1]} = hooks:imported
""",
}
QUIET = {
    "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
    "DD_REMOTE_CONFIGURATION_ENABLED": "false",
    "DD_TRACE_STARTUP_LOGS": "false",
}
DATADOG_SAYS = [f"{what} {module}" for module in HOOKED for what in ("code of", "imported")]
AUTOWRAPT_SAYS = [f"imported {module}" for module in HOOKED]


@dataclass(frozen=True)
class Scenario:
    """How the process starts, and what the neighbour's own work looks like in it."""

    before: str = ""  # run by a .pth file that is read before the shim's
    sitecustomize: str = ""  # run by sitecustomize.py, which is loaded when all .pth files are read
    after: str = ""  # run when the interpreter has started
    launcher: tuple[str, ...] = ("python",)
    env: dict[str, str] = field(default_factory=dict)
    works: dict[str, Any] = field(default_factory=dict)
    leaves: Callable[[Path, Path], None] = lambda python, folder: None


def coverage_measured(python: Path, folder: Path) -> None:
    """SGLang's manifest writer and its environment module have been measured."""
    run(python, "-m", "coverage", "json", "-q", "-o", "report.json", cwd=folder)
    files = json.loads((folder / "report.json").read_text())["files"]
    executed = {
        f"{Path(name).name}:{function}": lines["executed_lines"]
        for name, report in files.items()
        for function, lines in report["functions"].items()
    }
    assert executed["cache.py:_to_entries"]
    assert executed["environ.py:_handle_deprecated_envs"]


def raises(error: str) -> dict[str, Any]:
    return {"wrong type": [error, error]}


SCENARIOS = {
    "coverage, at process start": Scenario(
        env={"COVERAGE_PROCESS_START": ".coveragerc"}, leaves=coverage_measured
    ),
    "coverage run": Scenario(
        launcher=("python", "-m", "coverage", "run"), leaves=coverage_measured
    ),
    "debugpy": Scenario(
        launcher=("python", "-m", "debugpy", "--listen", "127.0.0.1:0"), works={"pydevd": True}
    ),
    # beartype adds a path hook, below PathFinder: there is no order among finders.
    "beartype": Scenario(before=BEARTYPE, works=raises("beartype.BeartypeCallHintParamViolation")),
    "typeguard first": Scenario(before=TYPEGUARD, works=raises("typeguard.TypeCheckError")),
    "typeguard last": Scenario(after=TYPEGUARD, works=raises("typeguard.TypeCheckError")),
    "jaxtyping first": Scenario(before=JAXTYPING, works=raises("jaxtyping.TypeCheckError")),
    "jaxtyping last": Scenario(after=JAXTYPING, works=raises("jaxtyping.TypeCheckError")),
    "autowrapt first": Scenario(
        env=AUTOWRAPT,
        works={"said": AUTOWRAPT_SAYS, "finders": ["wrapt", "sglang_jitfix"]},
    ),
    "autowrapt moved behind": Scenario(
        sitecustomize=BEHIND,
        env=AUTOWRAPT,
        works={"said": AUTOWRAPT_SAYS, "finders": ["sglang_jitfix", "wrapt"]},
    ),
    "ddtrace first": Scenario(
        before="import ddtrace.auto\n" + DDTRACE_PRODUCT, env=QUIET, works={"said": DATADOG_SAYS}
    ),
    "ddtrace-run": Scenario(
        launcher=("ddtrace-run", "python"),
        after=DDTRACE_PRODUCT,
        env=QUIET,
        works={"said": DATADOG_SAYS},
    ),
}


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel and all the neighbours, whose SGLang
    is that of the running one."""
    interpreter = new_environment(tmp_path_factory.mktemp("neighbours") / "env")
    run("uv", "pip", "install", "-q", "--python", interpreter, wheel, *PACKAGES)
    site = site_packages(interpreter)
    (site / "a_first.pth").write_text("import os; exec(os.environ.pop('TEST_BEFORE', ''), {})\n")
    (site / "sglang.pth").write_text(f"{site_packages(Path(sys.executable))}\n")
    (site / "hooks-1.dist-info").mkdir()
    for name, text in HOOKS.items():
        (site / name).write_text(text)
    assert sorted(file.name for file in site.glob("*.pth"))[:3] == [
        "a1_coverage.pth",
        "a_first.pth",
        "autowrapt-init.pth",
    ]
    return interpreter


def ask(python: Path, source: Path, folder: Path, scenario: Scenario, shim: str) -> dict[str, Any]:
    """The answers of one process; below *folder* are its linked home and its cache."""
    (folder / "real").mkdir(parents=True)
    (folder / "link").symlink_to("real")
    include = "[run]\ndata_file = .coverage\ninclude =\n  */compile/cache.py\n  */srt/environ.py\n"
    (folder / ".coveragerc").write_text(include)
    program, *options = scenario.launcher
    env = environment(None, shim, HOME=str(folder / "link"), **scenario.env)
    env |= {"TEST_BEFORE": scenario.before, "ANSWERS_FIRST": scenario.after}
    env["PATH"] = f"{python.parent}:{env['PATH']}"
    if scenario.sitecustomize:
        # On PYTHONPATH, for a system's own may lie beside the standard library.
        (folder / "sitecustomize.py").write_text(scenario.sitecustomize)
        env["PYTHONPATH"] = str(folder)
    done = subprocess.run(
        [python.parent / program, *options, ANSWERS, source, folder / "answers.json"],
        env=env,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout.decode(errors="replace")
    assert b"not patched" not in done.stdout
    answers: dict[str, Any] = json.loads((folder / "answers.json").read_text())
    return answers


@pytest.fixture(scope="module")
def without_either(
    python: Path, source: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The answers with the shim off and no neighbour, which show SGLang's fault."""
    folder = tmp_path_factory.mktemp("off") / "run"
    answers = ask(python, source, folder, Scenario(), "off")
    assert answers["patched"] == ["function"]
    assert len(staging_entries(folder / "real")) == 1
    for works in (scenario.works for scenario in SCENARIOS.values()):
        for name, value in works.items():
            assert answers["neighbour"][name] != value
    return answers


@pytest.mark.parametrize("name", SCENARIOS)
def test_beside(
    python: Path, source: Path, tmp_path: Path, without_either: dict[str, Any], name: str
) -> None:
    scenario = SCENARIOS[name]
    folder = tmp_path / "run"
    answers = ask(python, source, folder, scenario, "on")
    for question, answer in without_either["look"].items():
        assert answers["look"][question] == answer, question
    assert answers["patched"].count("_Function") == 1, "wrapped once"
    assert list((folder / "real").rglob("sgl_deps.json"))
    assert staging_entries(folder / "real") == []
    for question, answer in scenario.works.items():
        assert answers["neighbour"][question] == answer
    assert answers["neighbour"]["distutils"] == without_either["neighbour"]["distutils"]
    scenario.leaves(python, folder)


def test_beside_with_the_shim_off(python: Path, source: Path, tmp_path: Path) -> None:
    scenario = SCENARIOS["autowrapt moved behind"]
    answers = ask(python, source, tmp_path / "run", scenario, "off")
    assert answers["neighbour"]["said"] == AUTOWRAPT_SAYS
    assert answers["neighbour"]["finders"] == ["wrapt"]
    assert len(staging_entries(tmp_path / "run" / "real")) == 1


def test_hooked_module_as_target_of_python_m(tmp_path: Path) -> None:
    """It runs a second time, under another name and without our loader; same words on both."""
    said = {}
    for shim in ("on", "off"):
        env = environment(None, shim, HOME=str(tmp_path))
        said[shim] = run(sys.executable, "-m", CACHE, env=env, cwd=tmp_path)
    assert f"{CACHE!r} found in sys.modules" in said["off"]
    assert said["on"] == said["off"]
