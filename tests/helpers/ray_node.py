"""A node of one core on loopback, as `ray start --block` makes one; that command itself refuses clusters there.

Its arguments: the head's address, more of Ray's parameters as JSON, and the head's folder, by which it is found.
"""

import json
import os
import sys
import time

from ray._private.node import Node
from ray._private.parameter import RayParams


def main(address: str, parameters: str) -> None:
    params = RayParams(
        gcs_address=address, node_ip_address="127.0.0.1", num_cpus=1, num_gpus=0, object_store_memory=80 * 2**20,
        min_worker_port=0, max_worker_port=0, node_manager_port=0, include_log_monitor=False, **json.loads(parameters),
    )  # fmt: skip
    node = Node(params, head=False, shutdown_at_exit=True, spawn_reaper=True)
    print("this node will now block", flush=True)
    while not node.dead_processes():
        time.sleep(0.1)
    node.kill_all_processes(check_alive=False, allow_graceful=False)
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:3])
