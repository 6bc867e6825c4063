"""A Ray driver: two nodes on this machine, and actors that load one module through SGLang.

``python tests/ray_cluster.py PLAN`` prints a JSON list, one report for each actor in the
plan. It is a process of its own because Ray changes the environment of its driver. PLAN is
a JSON object: ``source``, the module's C++ file, and ``actors``, for each its ``node``,
the folder to ``chdir`` to or null, and the ``root`` in its ``runtime_env`` or null.

Node ``inherits`` is started with the driver's environment, node ``lacks`` without
``SGLANG_JIT_CACHE_DIR``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import ray
from ray.cluster_utils import Cluster

from sglang_jitfix import ROOT

# What keeps Ray on the loopback interface and quiet, for the driver's environment.
SETTINGS = {
    # Without this Ray looks for an address that other machines can reach.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Under `uv run` Ray would start its workers with another `uv run`.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # Workers rename themselves, which would write over the environment that ps shows.
    "SPT_NOENV": "1",
}


class Loader:
    """The actor."""

    def load(self, source: str, folder: str | None) -> dict[str, Any]:
        """Go to *folder*, load the module, and report as `sglang_jitfix.cli.probe` does, with
        the root as this process found it at its start and as it is in its environment."""
        import contextlib
        import io

        import sglang_jitfix
        from sglang_jitfix.cli import probe

        if folder is not None:
            os.chdir(folder)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            probe.main(source)
        report: dict[str, Any] = json.loads(out.getvalue().splitlines()[-1])
        found = sglang_jitfix.found_at_start
        here = {"found": found[ROOT], "variable": os.environ.get(ROOT), "cwd": os.getcwd()}
        return {**report, **here}


def main(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """The reports; Ray has ended all its processes when this returns or raises."""
    cluster = Cluster()
    try:
        for node in ("inherits", "lacks"):
            if node == "lacks":
                os.environ.pop(ROOT, None)
            cluster.add_node(
                num_cpus=0,  # so that no workers are started ahead of the actors
                resources={node: len(plan["actors"])},
                node_ip_address="127.0.0.1",
                include_dashboard=False,
            )
        ray.init(address=cluster.address)
        loads = []
        for actor in plan["actors"]:
            variables = {} if actor["root"] is None else {ROOT: actor["root"]}
            loader = ray.remote(Loader).options(
                num_cpus=0, resources={actor["node"]: 1}, runtime_env={"env_vars": variables}
            )
            loads.append(loader.remote().load.remote(plan["source"], actor["chdir"]))
        print(f"waiting for {len(loads)} actors to import SGLang", file=sys.stderr, flush=True)
        reports: list[dict[str, Any]] = ray.get(loads, timeout=540)
        return reports
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
