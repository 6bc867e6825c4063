"""Two nodes of one engine, on the loopback interface, each with its own spelling of their root."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

import stack
from stack import Cpu, Server
from support import environment, staging_entries


@pytest.mark.parametrize(("shim", "compiles"), [("on", [0, 0, 0, 1]), ("off", [1, 1, 1, 1])])
def test_two_nodes(cpu: Cpu, tmp_path: Path, shim: str, compiles: list[int]) -> None:
    """A launcher and one rank on each node load the module: one compile in all, or four."""
    folder = stack.linked(tmp_path)
    (folder / "node").mkdir()
    (folder / "mount").symlink_to("link")
    loads = folder / "loads"
    group = {"tp_size": 2, "nnodes": 2, "dist_init_addr": f"127.0.0.1:{stack.free_port()}"}
    nodes = []
    with ExitStack() as exits:
        for rank, (given, cwd) in enumerate(
            [("link/not/yet", folder), (f"{folder}/mount/./not/yet", folder / "node")]
        ):
            arguments = {**cpu.arguments, **group, "node_rank": rank}
            settings = {**cpu.env, **cpu.plugin, stack.LOADS: str(loads)}
            env = environment(given, shim, **settings, GLOO_SOCKET_IFNAME="lo")
            node = Server(arguments, folder / f"{rank}.log", cwd, env)
            nodes.append(exits.enter_context(node))
        reports = stack.wait_for_loads(loads, 4, nodes[0].process, nodes[0].log)
        assert sorted(report["compiles"] for report in reports) == compiles
        assert len(staging_entries(folder / "real")) == (0 if shim == "on" else 4)
        if shim == "on":
            assert {report["given"] for report in reports} == {str(folder / "real/not/yet")}
            nodes[0].wait_until_up()
            status, tokens = nodes[0].generate()
            assert status == 200
            assert len(tokens) == stack.GREEDY["max_new_tokens"]
            assert nodes[1].process.poll() is None
