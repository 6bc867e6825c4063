"""``python -m sglang.launch_server``, whole: started cold, then again with compiling forbidden.

Its launcher and each of its ranks load one JIT module.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import stack
from stack import FORBID, Cpu, Server, Witness
from support import environment, staging_entries

KEY = "a secret"


def started(
    cpu: Cpu,
    folder: Path,
    name: str,
    given: str | None,
    shim: str,
    key: str | None,
    ranks: int,
    **settings: str,
) -> tuple[Server, Path]:
    """A server with *given* as root, working in *folder*, and the file its loads go into."""
    loads = folder / f"{name}.loads"
    settings = {**cpu.plugin, stack.LOADS: str(loads), **settings}
    env = environment(given, shim, **settings)
    arguments = {**cpu.arguments, "tp_size": ranks}
    return Server(arguments, folder / f"{name}.log", folder, env, key), loads


def compiles_of(loads: Path, count: int, server: Server) -> list[int]:
    """The compiles of each process that loads the module, once *count* of them have."""
    reports = stack.wait_for_loads(loads, count, server.process, server.log)
    return [report["compiles"] for report in reports]


def test_two_ranks_and_a_key(cpu: Cpu, tmp_path: Path) -> None:
    """A relative, linked root with a suffix that does not exist yet."""
    folder = stack.linked(tmp_path)
    physical = str(folder / "real/not/yet")
    answers = []
    compiles = []
    for name, settings in {"cold": {}, "again": FORBID}.items():
        server, loads = started(cpu, folder, name, "link/not/yet", "on", KEY, 2, **settings)
        with server:
            # Two ranks and the detokenizer.
            assert Witness(server.process, server.log).roots(3) == [physical] * 3
            server.wait_until_up()
            answers.append(server.generate(key=KEY))
            assert server.generate()[0] == 401
            assert server.generate(key="another")[0] == 401
            compiles.append(compiles_of(loads, 3, server))
        assert {report["given"] for report in stack.loads(loads)} == {physical}
    assert compiles == [[1, 0, 0], [0, 0, 0]]
    assert staging_entries(folder / "real") == []
    status, tokens = answers[0]
    assert status == 200
    assert len(tokens) == stack.GREEDY["max_new_tokens"]
    assert answers[1] == answers[0]


def test_two_ranks_and_a_key_without_the_shim(cpu: Cpu, tmp_path: Path) -> None:
    folder = stack.linked(tmp_path)
    server, loads = started(cpu, folder, "cold", "link/not/yet", "off", KEY, 2)
    with server:
        assert compiles_of(loads, 3, server) == [1, 1, 1]
    assert len(staging_entries(folder / "real")) == 3
    assert fails(*started(cpu, folder, "again", "link/not/yet", "off", KEY, 2, **FORBID))


def fails(server: Server, loads: Path) -> bool:
    """Whether *server* ends by itself because it may not compile."""
    with server:
        stack.wait_for(
            "the server to fail",
            lambda: server.process.poll() is not None,
            server.process,
            server.log,
        )
    [report] = stack.loads(loads)
    return server.process.returncode == 1 and "has no usable cached build" in report["error"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home whose ``.cache`` is a link."""
    home = tmp_path.resolve() / "home"
    home.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (home / ".cache").symlink_to("../elsewhere")
    return home


def test_default_and_home_without_a_key(cpu: Cpu, tmp_path: Path, home: Path) -> None:
    """The root unset; then, in the same folder, spelled ``~/...``."""
    physical = str(tmp_path.resolve() / "elsewhere/sglang/jit")
    answers = []
    compiles = []
    for name, given, settings in (
        ("cold", None, {}),
        ("again", "~/.cache/sglang/jit", FORBID),
    ):
        server, loads = started(
            cpu, tmp_path, name, given, "on", None, 1, HOME=str(home), **settings
        )
        with server:
            # The only rank and the detokenizer.
            assert Witness(server.process, server.log).roots(2) == [physical] * 2
            server.wait_until_up()
            answers.append(server.generate())
            compiles.append(compiles_of(loads, 2, server))
        assert {report["given"] for report in stack.loads(loads)} == {physical}
    assert compiles == [[1, 0], [0, 0]]
    assert staging_entries(tmp_path / "elsewhere") == []
    assert answers[0][0] == 200
    assert len(answers[0][1]) == stack.GREEDY["max_new_tokens"]
    assert answers[1] == answers[0]


def test_default_and_home_without_the_shim(cpu: Cpu, tmp_path: Path, home: Path) -> None:
    server, loads = started(cpu, tmp_path, "cold", None, "off", None, 1, HOME=str(home))
    with server:
        assert compiles_of(loads, 2, server) == [1, 1]
    assert len(staging_entries(tmp_path / "elsewhere")) == 2
    settings = {"HOME": str(home), **FORBID}
    spelled = "~/.cache/sglang/jit"
    assert fails(*started(cpu, tmp_path, "again", spelled, "off", None, 1, **settings))
