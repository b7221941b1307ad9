"""A Ray cluster in one process: a head without cores and two machines of one core; a line on stdin has one go.

"kill" kills a busy machine, "drain" has Ray drain it, as the cloud's notice does, until it stops by itself.

Ray's simulation works on a main thread only, hence a script. It prints the address, and ends when stdin does.
"""

import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any, TextIO

import ray
from ray._private.state import actors
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason


def main() -> None:
    """Ray itself prints of dying machines on stdout, whenever it learns of them: only answers go there."""
    answers = sys.stdout
    with redirect_stdout(sys.stderr):
        serve(answers)


def serve(answers: TextIO) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    machines = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    cluster.connect()
    print(cluster.address, file=answers, flush=True)
    for line in sys.stdin:
        machine = busy(machines)
        if line == "drain\n":
            reason, deadline_ms = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"), int(1000 * (time.time() + 900))
            accepted, told = GcsClient(address=cluster.address).drain_node(machine.node_id, reason, "spot", deadline_ms)
            print("drained" if accepted else told, file=answers, flush=True)
        else:
            cluster.remove_node(machine, allow_graceful=False)
            print("killed", file=answers, flush=True)
        cluster.add_node(num_cpus=1)
    ray.shutdown()
    cluster.shutdown()


def busy(machines: Sequence[Any]) -> Any:
    """A machine with a worker: one that is only asked for would not be missed."""
    alive = [actor for actor in actors().values() if actor["State"] == "ALIVE"]
    nodes = {actor["Address"]["NodeID"] for actor in alive}
    return next(machine for machine in machines if machine.node_id in nodes)


if __name__ == "__main__":
    main()
