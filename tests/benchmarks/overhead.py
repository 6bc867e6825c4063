"""What the shim costs: interpreter start, `import sglang`, and a warm load.

    uv run python tests/benchmarks/overhead.py [starts|import|load]...

Each pair is measured alternately in this one run; the figure is the ratio of the
medians, with the shim to without. Absolute times mean little on a shared machine.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from sglang_jitfix.cli import probe
from support import (
    environment,
    load_once,
    new_environment,
    run,
    site_packages,
)


def alternate(
    name: str, rounds: int, without: Callable[[], float], with_shim: Callable[[], float]
) -> None:
    """Print the ratio of the two medians over *rounds* alternating pairs."""
    pairs = []
    for number in range(rounds):
        first, second = (without, with_shim) if number % 2 else (with_shim, without)
        one, two = first(), second()
        pairs.append((one, two) if number % 2 else (two, one))
    base, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
    # The spread of a ratio that should be 1: one half of the baseline against the other.
    halves = [statistics.median([pair[0] for pair in pairs[start::2]]) for start in (0, 1)]
    noise = abs(halves[0] / halves[1] - 1)
    print(
        f"{name:42} {ours / base:6.3f}   ({base * 1000:.2f} ms without, {ours * 1000:.2f} ms with,"
        f" {rounds} rounds, noise {noise:.1%})",
        flush=True,
    )


def timed(command: list[str], env: dict[str, str]) -> float:
    """Seconds until *command* has run to its end."""
    start = time.perf_counter()
    pid = os.posix_spawn(command[0], command, env)
    _, status = os.waitpid(pid, 0)
    seconds = time.perf_counter() - start
    assert status == 0
    return seconds


def starts(folder: Path) -> None:
    """A bare interpreter, against one whose only start-up file is empty."""
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    ours, bare = new_environment(folder / "ours"), new_environment(folder / "bare")
    run("uv", "pip", "install", "-q", "--python", ours, *folder.glob("*.whl"))
    (site_packages(bare) / "empty.pth").touch()
    for name, root in (("unset", None), ("a link", folder / "link/cache")):
        env = environment(root)
        alternate(
            f"interpreter start, root {name}",
            600,
            lambda env=env: timed([str(bare), "-c", ""], env),  # type: ignore[misc]
            lambda env=env: timed([str(ours), "-c", ""], env),  # type: ignore[misc]
        )


def imports(folder: Path) -> None:
    """`import sglang`, against the same with the off switch set."""
    command = [sys.executable, "-c", "import sglang.kernels.jit.utils.compile"]
    root = folder / "link/cache"
    timed(command, environment(root))
    alternate(
        "import sglang",
        15,
        lambda: timed(command, environment(root, "off")),
        lambda: timed(command, environment(root)),
    )


def loads(folder: Path) -> None:
    """A warm load through a link with the shim, against one by plain path without it."""
    source = folder / "probe.cpp"
    source.write_text(probe.SOURCE)
    plain, linked = environment(folder / "plain", "off"), environment(folder / "link/cache")
    for env in (plain, linked):
        load_once(source, env, folder)
    alternate(
        "warm load, link and shim : plain, no shim",
        15,
        lambda: float(load_once(source, plain, folder)["seconds"]),
        lambda: float(load_once(source, linked, folder)["seconds"]),
    )


ROOT = Path(__file__).parents[2]
PARTS = {"starts": starts, "import": imports, "load": loads}


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        (folder / "real").mkdir()
        (folder / "link").symlink_to("real")
        for part in sys.argv[1:] or PARTS:
            PARTS[part](folder)


if __name__ == "__main__":
    main()
