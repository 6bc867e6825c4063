"""Two nodes of one engine, on the loopback interface, each with its own spelling of their root."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import stack
from stack import Cpu, Server
from support import environment, staging_entries


@contextmanager
def nodes(cpu: Cpu, folder: Path, loads: Path, shim: str) -> Iterator[list[Server]]:
    """Both nodes, started: one rank on each, the first one serves. Each works in a folder of
    its own, and has its own link to the root."""
    group = {"tp_size": 2, "nnodes": 2, "dist_init_addr": f"127.0.0.1:{stack.free_port()}"}
    settings = {**cpu.plugin, stack.LOADS: str(loads)}
    with ExitStack() as exits:
        servers = []
        for rank, (given, work) in enumerate(
            [("link/not/yet", folder), (f"{folder}/mount/../link/not/yet", folder / "work")]
        ):
            # Ranks find each other on the loopback interface, whatever this host's name means.
            env = environment(given, shim, **settings, GLOO_SOCKET_IFNAME="lo")
            arguments = {**cpu.arguments, **group, "node_rank": rank}
            log = folder / f"{loads.name}.{rank}.log"
            servers.append(exits.enter_context(Server(arguments, log, work, env)))
        yield servers


def lay_out(folder: Path) -> Path:
    folder = stack.linked(folder)
    (folder / "work").mkdir()
    (folder / "mount").symlink_to("real")
    return folder


def test_two_nodes(cpu: Cpu, tmp_path: Path) -> None:
    """One compile for the launchers and ranks of both."""
    folder = lay_out(tmp_path)
    loads = folder / "loads"
    with nodes(cpu, folder, loads, "on") as (first, second):
        first.wait_until_up()
        status, tokens = first.generate()
        assert second.process.poll() is None
    reports = stack.loads(loads)
    assert {report["given"] for report in reports} == {str(folder / "real/not/yet")}
    assert sorted(report["compiles"] for report in reports) == [0, 0, 0, 1]
    assert staging_entries(folder / "real") == []
    assert status == 200
    assert len(tokens) == stack.GREEDY["max_new_tokens"]


def test_two_nodes_without_the_shim(cpu: Cpu, tmp_path: Path) -> None:
    folder = lay_out(tmp_path)
    loads = folder / "loads"
    with nodes(cpu, folder, loads, "off") as (first, _):
        reports = stack.wait_for_loads(loads, 4, first.process, first.log)
    assert [report["compiles"] for report in reports] == [1, 1, 1, 1]
    assert len(staging_entries(folder / "real")) == 4
