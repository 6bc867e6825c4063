"""``sglang.Runtime`` and ``sglang.Engine``: what child processes inherit, what recompiles.

The seven regression cases are the tests named ``test_regression_case``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import stack
from stack import FORBID, Cpu, linked
from support import environment, python, staging_entries

KEY = "a secret"

# One after the other in one process, as the first argument lists them: a Runtime or an
# Engine, its API key (null: none), its port. Prints the tokens that each gave. SGLang
# 0.5.21's Runtime does not send its own server the key: with one, the constructor fails
# with Unauthorized once the server is up, and what is left is the server, which is asked
# directly.
LIVES = """
import json, multiprocessing, sys
import requests, sglang
from sglang.srt.utils import kill_process_tree

lives, greedy, arguments = map(json.loads, sys.argv[1:])


def runtime_tokens(key, port):
    try:
        runtime = sglang.Runtime(**arguments, host="127.0.0.1", port=port, api_key=key)
        reply = json.loads(runtime.generate("hello", greedy))
        runtime.shutdown()
    except RuntimeError as error:
        if key is None or "Unauthorized" not in str(error):
            raise
        url = f"http://127.0.0.1:{port}/generate"
        body = {"text": "hello", "sampling_params": greedy}
        assert requests.post(url, json=body).status_code == 401
        reply = requests.post(url, json=body, headers={"Authorization": f"Bearer {key}"}).json()
        [server] = multiprocessing.active_children()
        kill_process_tree(server.pid)
    for server in multiprocessing.active_children():
        server.join()
    return reply["output_ids"]


def engine_tokens(key, port):
    engine = sglang.Engine(**arguments, port=port, api_key=key)
    tokens = engine.generate("hello", greedy)["output_ids"]
    engine.shutdown()
    return tokens


ask = {"Runtime": runtime_tokens, "Engine": engine_tokens}
print("tokens", json.dumps([ask[kind](key, port) for kind, key, port in lives]))
"""

Life = tuple[str, str | None]  # Runtime or Engine, and its API key


@contextmanager
def running(
    cpu: Cpu, lives: list[Life], folder: Path, env: dict[str, str]
) -> Iterator[stack.Witness]:
    """A process that has *lives* in *folder*, ended with all its children on the way out."""
    log = folder / f"{len(list(folder.glob('*.log')))}.log"
    ports = json.dumps([[*life, stack.free_port()] for life in lives])
    command = ["-c", LIVES, ports, json.dumps(stack.GREEDY), json.dumps(cpu.arguments)]
    process = stack.start(command, log, folder, env)
    try:
        yield stack.Witness(process, log)
    finally:
        stack.end(process)


@pytest.mark.parametrize("key", [KEY, None], ids=["API key", "no API key"])
@pytest.mark.parametrize(
    "given", ["{0}/link/not/yet", "link/not/yet"], ids=["absolute", "relative"]
)
def test_regression_case_link(cpu: Cpu, tmp_path: Path, given: str, key: str | None) -> None:
    """A linked root with a suffix that does not exist yet: the children of a Runtime carry the
    physical path, and nobody has made the folder. (Its server is looked at here, the
    scheduler and detokenizer in ``test_created_again``.)"""
    roots = {}
    for shim in ("on", "off"):
        folder = linked(tmp_path / shim)
        root = given.replace("{0}", str(folder))
        env = environment(root, shim, **cpu.env)
        with running(cpu, [("Runtime", key)], folder, env) as witness:
            roots[shim] = witness.roots(1)
        assert list((folder / "real").iterdir()) == []
    assert roots == {
        "on": [f"{tmp_path.resolve()}/on/real/not/yet"],
        "off": [given.replace("{0}", f"{tmp_path.resolve()}/off")],
    }


# What a child process is given, which runs no start-up file itself, and the root that
# SGLang uses here.
CHILD = """
import json, os, subprocess, sys
from sglang.kernels.jit.utils.compile import cache
code = "import json, os; print(json.dumps(os.environ.get('SGLANG_JIT_CACHE_DIR')))"
child = subprocess.check_output([sys.executable, "-S", "-c", code])
print(json.dumps([json.loads(child), os.path.realpath(cache.cache_root())]))
"""


@pytest.mark.parametrize(
    ("given", "below_home"),
    [(None, ".cache/sglang/jit"), ("", ".cache/sglang/jit"), ("~/not/yet", "not/yet")],
    ids=["unset", "empty", "home"],
)
def test_regression_case_default(tmp_path: Path, given: str | None, below_home: str) -> None:
    """Unset, empty and ``~/...`` under a linked home: the children of a process that imports
    SGLang are given the real path of the folder it uses, which nobody has made."""
    folder = linked(tmp_path)
    physical = str(folder / "real" / below_home)
    found = {}
    for shim in ("on", "off"):
        env = environment(given, shim, HOME=str(folder / "link"))
        found[shim] = json.loads(python(CHILD, env=env, cwd=tmp_path).splitlines()[-1])
        assert not Path(physical).exists()
    assert found == {"on": [physical, physical], "off": [given, physical]}


@pytest.mark.timeout(1800)  # six starts, one after the other
def test_created_again(cpu: Cpu, tmp_path: Path) -> None:
    """A Runtime and an Engine, with a key, then each without in the same process, then each with
    one in a new process: one compile."""
    folder = linked(tmp_path)
    tokens: list[list[int]] = []
    seen: list[str | None] = []
    cold, warm = folder / "cold", folder / "warm"
    lives: list[tuple[str, list[Life], Path, dict[str, str]]] = [
        (
            "link/not/yet",
            [("Runtime", KEY), ("Engine", KEY), ("Runtime", None), ("Engine", None)],
            cold,
            {},
        ),
        (str(folder / "link/not/yet"), [("Runtime", KEY), ("Engine", KEY)], warm, FORBID),
    ]
    for root, each, loads, settings in lives:
        env = environment(root, **cpu.plugin, **settings, **{stack.LOADS: str(loads)})
        with running(cpu, each, folder, env) as witness:
            witness.wait(1500)
        [line] = re.findall(r"^tokens (.*)$", stack.text(witness.log), re.MULTILINE)
        tokens += json.loads(line)
        seen += witness.seen.values()
    physical = str(folder / "real/not/yet")
    # Three times a Runtime's server, and six times a scheduler and a detokenizer.
    assert seen == [physical] * (3 + 6 * 2)
    reports = stack.loads(cold) + stack.loads(warm)
    assert {report["given"] for report in reports} == {physical}
    # The servers, the schedulers, and both processes when they make their first Engine load
    # the module; the second Engine of a process does not ask again.
    assert [report["compiles"] for report in reports] == [1] + [0] * (3 + 6 + 2 - 1)
    assert staging_entries(folder / "real") == []
    assert len(tokens[0]) == stack.GREEDY["max_new_tokens"]
    assert tokens == [tokens[0]] * 6


def test_created_once_without_the_shim(cpu: Cpu, tmp_path: Path) -> None:
    """Each of the two processes that load the module compiles it. (Engines without the shim
    are in test_weight_cache.py.)"""
    folder = linked(tmp_path)
    loads = folder / "loads"
    env = environment("link/not/yet", "off", **cpu.plugin, **{stack.LOADS: str(loads)})
    with running(cpu, [("Runtime", None)], folder, env) as witness:
        roots = witness.roots(3)  # of the server, its scheduler and its detokenizer
        reports = stack.wait_for_loads(loads, 2, witness.process, witness.log)
    assert roots == ["link/not/yet"] * 3
    assert [report["compiles"] for report in reports] == [1, 1]
    assert len(staging_entries(folder / "real")) == 2
