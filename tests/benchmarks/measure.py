"""What the shim costs and what it saves: one command, one table, one figure.

    uv run python tests/benchmarks/measure.py [PART]...

The parts are starts, import, load, look-up and restart; without one it measures all, about
twenty minutes on two cores. The figures take the place of the old ones in results.md beside this
file, and those of restart also in restart.svg. What is compared is measured alternately in one
run, and what counts are the ratios of medians: absolute times mean little on a shared machine.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import cycle
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from forks import Answer, Forks, forks  # noqa: E402
from sglang_jitfix import ROOT, releases  # noqa: E402
from sglang_jitfix.cli import probe  # noqa: E402
from support import (  # noqa: E402
    REPOSITORY,
    environment,
    new_environment,
    run,
)

WORKERS = (1, 2, 4, 8)
ROUNDS = 5
Lines = list[str]


def alternate(cases: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """The seconds of each case in *rounds* rounds, the order turned round each time."""
    found: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds):
        for name in list(cases)[:: 1 if number % 2 else -1]:
            found[name].append(cases[name]())
    return found


def ratios(found: Mapping[str, list[float]], base: str) -> Lines:
    """Rows of a table: the ratio of each case's median to that of *base*, and the spread."""
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    # How far a ratio is from 1 by chance: one half of the baseline against the other.
    halves = [statistics.median(found[base][start::2]) for start in (0, 1)]
    noise = abs(halves[0] / halves[1] - 1)
    rounds = len(found[base])
    lines = [
        f"| {name} | {medians[name] / medians[base]:.3f} | {medians[name] * 1000:.4g} ms |"
        for name in found
    ]
    return [
        "| | ratio | median |",
        "|---|---:|---:|",
        *lines,
        "",
        f"{rounds} rounds, noise {noise:.1%}.",
    ]


def timed(command: list[str], env: dict[str, str]) -> float:
    """Seconds until *command* has run to its end."""
    start = time.perf_counter()
    pid = os.posix_spawn(command[0], command, env)
    _, status = os.waitpid(pid, 0)
    seconds = time.perf_counter() - start
    assert status == 0
    return seconds


def starts(folder: Path) -> Lines:
    """An interpreter that does nothing, beside other packages that have a start-up file."""
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=REPOSITORY)
    (wheel,) = folder.glob("*.whl")
    packages = {
        "no `.pth`": None,
        "empty `.pth`": None,
        "an empty module": None,
        "sglang-jitfix": wheel,
        "setuptools": "setuptools==84.2.1",
        "coverage": "coverage==7.17.3",
        "autowrapt": "autowrapt==2.0.0",
    }
    executables = {}
    for number, (name, package) in enumerate(packages.items()):
        executables[name] = new_environment(folder / f"env{number}")
        if package:
            run("uv", "pip", "install", "-q", "-p", executables[name], package)
        elif name != "no `.pth`":
            write_start_up_file(executables[name], name)
    lines = both_ways("in an environment of its own", executables, folder)
    return [*lines, "", *serving_starts(folder)]


def serving_starts(folder: Path) -> Lines:
    """The same in an environment that serves: SGLang requires setuptools, by way of torch, and
    nvidia-cutlass-dsl, and both have start-up files that import."""
    executables: dict[str, Path] = {}
    for name in ("empty `.pth`", "an empty module", "sglang-jitfix"):
        place = folder / f"serving{len(executables)}"
        sync = ["uv", "sync", "-q", "-p", sys.executable, "--no-dev", "--extra", "sglang"]
        sync += ["--no-editable", "--reinstall-package", "sglang-jitfix"]
        run(*sync, cwd=REPOSITORY, env=environment(UV_PROJECT_ENVIRONMENT=str(place)))
        executables[name] = place / "bin" / "python"
        start_up_file = site_of(executables[name]) / "sglang_jitfix.pth"
        assert "sglang_jitfix.init()" in start_up_file.read_text()
        if name != "sglang-jitfix":
            start_up_file.unlink()
            write_start_up_file(executables[name], name)
    return both_ways("where SGLang and all that it requires are installed", executables, folder)


def write_start_up_file(executable: Path, name: str) -> None:
    """An empty one, or one that imports an empty module."""
    site = site_of(executable)
    module = name == "an empty module"
    if module:
        (site / "empty").mkdir()
        (site / "empty" / "__init__.py").touch()
    (site / "empty.pth").write_text("import empty\n" if module else "")


def site_of(executable: Path) -> Path:
    """Its site-packages, found without starting it, which would write bytecode."""
    (site,) = executable.parents[1].glob("lib/python*/site-packages")
    return site


def both_ways(where: str, executables: Mapping[str, Path], folder: Path) -> Lines:
    """Starts of *executables*, none of which has bytecode yet: without it first, then with it."""
    tables = []
    for way, setting in (("Without", "1"), ("With", "")):
        cases: dict[str, Callable[[], float]] = {}
        for name, executable in executables.items():
            command = [str(executable), "-c", ""]
            env = environment(PYTHONDONTWRITEBYTECODE=setting)
            timed(command, env)  # which writes bytecode, or does not
            compiled = list(site_of(executable).glob("*/__pycache__"))
            if name != "sglang-jitfix":
                cases[name] = partial(timed, command, env)
                assert not (setting and compiled)
            else:
                linked = {**env, ROOT: str(folder / "link/cache")}
                cases[f"{name}, root unset"] = partial(timed, command, env)
                cases[f"{name}, root a link"] = partial(timed, command, linked)
                assert bool(setting) != bool(compiled)
        figures = ratios(alternate(cases, 400), "empty `.pth`")
        tables.append([f"{way} bytecode on disk, {where}:", "", *figures])
    without, with_it = tables
    return [*with_it, "", *without]


def imports(folder: Path) -> Lines:
    """`import sglang` and its JIT compiler, with the shim and with its off switch."""
    command = [sys.executable, "-c", "import sglang.kernels.jit.utils.compile"]
    on, off = environment(folder / "link/cache"), environment(folder / "link/cache", "off")
    timed(command, on)
    cases = {"without": lambda: timed(command, off), "with": lambda: timed(command, on)}
    return ratios(alternate(cases, 15), "without")


def loads(folder: Path) -> Lines:
    """A warm load, the first of its process: through a link with the shim, by plain path without.

    The processes are forked from some that have imported SGLang, so that there can be many.
    Three on each side, since those differ by a few percent among themselves."""
    source = folder / "probe.cpp"
    source.write_text(probe.SOURCE)
    environments = {
        "plain path, without": environment(folder / "plain", "off"),
        "link, with": environment(folder / "link/cache"),
    }
    with ExitStack() as exits:
        running: dict[str, list[Forks]] = {name: [] for name in environments}
        for number in range(3):
            for name in list(environments)[:: 1 if number % 2 else -1]:
                each = exits.enter_context(forks(source, environments[name]))
                each.load(1, {})  # the very first compiles
                running[name].append(each)
        cases = {name: partial(warm, cycle(each)) for name, each in running.items()}
        return ratios(alternate(cases, 300), "plain path, without")


def warm(running: Iterator[Forks]) -> float:
    """Seconds of one load in a new worker of the next process, which must not compile."""
    answer = next(running).load(1, {})
    assert answer.compiles == [0]
    [seconds] = answer.loads
    return seconds


def look_ups(folder: Path) -> Lines:
    """SGLang's look-up of a manifest of 400 dependencies, with the shim and without."""
    script = str(HERE / "look_up.py")
    command = (sys.executable, script, str(folder), "400", "400")
    said = run(*command, env=environment(folder), stderr=None)
    lines = []
    for kind, found in json.loads(said.splitlines()[-1]).items():
        lines += [f"The {kind} look-up of a process:", "", *ratios(found, "good leaf, without"), ""]
    return lines[:-1]


def restarts(folder: Path) -> Lines:
    """Restarts of 1 to 8 workers through a link, the cache poisoned or good, and by plain path."""
    source = folder / "probe.cpp"
    source.write_text(probe.SOURCE)
    # A root for each: a good leaf that the shim publishes would serve the others as well.
    environments = {
        "without": environment(folder / "link/without", "off"),
        "poisoned": environment(folder / "link/poisoned"),
        "good": environment(folder / "link/good"),
        "plain": environment(folder / "plain", "off"),
    }
    with ExitStack() as exits:
        cases = {
            name: exits.enter_context(forks(source, env)) for name, env in environments.items()
        }
        cases["without"].load(1, {ROOT: environments["poisoned"][ROOT]})
        for processes in cases.values():
            processes.load(1, {})
        found: dict[tuple[str, int], list[Answer]] = {}
        for number in range(ROUNDS):
            for name in list(cases)[:: 1 if number % 2 else -1]:
                for count in WORKERS:
                    answer = cases[name].load(count, {})
                    found.setdefault((name, count), []).append(answer)
    seconds = {
        key: statistics.median(answer.seconds for answer in answers)
        for key, answers in found.items()
    }
    figure(seconds)
    lines = [
        "| workers | without the shim | with it, poisoned cache | with it, good cache |",
        "|---:|---:|---:|---:|",
    ]
    for count in WORKERS:
        cells = []
        for name in ("without", "poisoned", "good"):
            (compiles,) = {sum(answer.compiles) for answer in found[name, count]}
            cells.append(f"{seconds[name, count] / seconds['plain', count]:.2f} ({compiles})")
        lines.append(f"| {count} | {' | '.join(cells)} |")
    return [
        *lines,
        "",
        "Times as multiples of the same restart by plain path without the shim, and in brackets",
        f"the compiles of all workers; medians of {ROUNDS} rounds. A poisoned cache is one that",
        "was filled through a link without the shim.",
    ]


def figure(seconds: Mapping[tuple[str, int], float]) -> None:
    """Write restart.svg; its colours stand out on white and on black."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "restart", "svg.fonttype": "none", "font.size": 11})
    from matplotlib import pyplot

    grey = "#8a8a8a"
    chart, axes = pyplot.subplots(figsize=(7, 3.4))
    for shift, (name, label, colour) in enumerate(
        (
            ("without", "linked root, without the shim", "#e4572e"),
            ("poisoned", "linked root, with the shim", "#3a9d5d"),
            ("plain", "plain path (the limit)", "#5b8def"),
        )
    ):
        heights = [seconds[name, count] / seconds["plain", count] for count in WORKERS]
        places = [place + (shift - 1) * 0.27 for place in range(len(WORKERS))]
        bars = axes.bar(places, heights, 0.25, label=label, color=colour)
        texts = [f"{height:.0f}" if height >= 10 else f"{height:.1f}" for height in heights]
        axes.bar_label(bars, texts, color=grey, padding=2)
    axes.set_yscale("log")
    axes.set_ylim(0.5, 2 * max(seconds["without", n] / seconds["plain", n] for n in WORKERS))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xticks(range(len(WORKERS)), [str(count) for count in WORKERS])
    axes.set_xlabel("processes started at once", color=grey)
    axes.set_ylabel("time to load, plain path = 1", color=grey)
    axes.tick_params(colors=grey, which="both")
    above = {"loc": "lower center", "bbox_to_anchor": (0.5, 1), "ncols": 3}
    axes.legend(frameon=False, labelcolor=grey, fontsize=9, **above)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(grey)
    chart.tight_layout()
    chart.savefig(HERE / "restart.svg", transparent=True, metadata={"Date": None})


PARTS: dict[str, tuple[str, Callable[[Path], Lines]]] = {
    "starts": ("Interpreter start, against an empty start-up file", starts),
    "import": ("`import sglang`, with and without the shim", imports),
    "load": ("A warm load in a fresh process", loads),
    "look-up": ("SGLang's look-up of a build with 400 dependencies", look_ups),
    "restart": ("Restart on a warm cache through a link", restarts),
}


def main() -> None:
    wanted = sys.argv[1:] or list(PARTS)
    results = HERE / "results.md"
    # What is not measured now stays as it is on the page.
    sections = dict(part.split("\n", 1) for part in results.read_text().split("\n## ")[1:])
    for name in wanted:
        title, measure = PARTS[name]
        print(f"measuring: {title} ...", file=sys.stderr, flush=True)
        folder = Path(tempfile.mkdtemp()).resolve()
        try:
            (folder / "real").mkdir()
            (folder / "link").symlink_to("real")
            sections[title] = "\n".join(measure(folder))
        finally:
            shutil.rmtree(folder)
        print(sections[title])
    cores = len(os.sched_getaffinity(0))
    versions = f"Python {platform.python_version()}, SGLang {releases.installed()}"
    page = [
        "# Measured",
        "",
        f"By `python tests/benchmarks/measure.py`, on {cores} cores, {versions}. Noise is how far",
        "the medians of every other round are apart.",
    ]
    page += [f"\n## {title}\n\n{sections[title].strip()}" for title, _ in PARTS.values()]
    results.write_text("\n".join(page) + "\n")


if __name__ == "__main__":
    main()
