"""A Ray cluster in one process: a head without cores and two machines of one core; a line on stdin kills a machine.

Ray's simulation works on a main thread only, hence a script. It prints the address, and ends when stdin does.
"""

import sys

from ray.cluster_utils import Cluster


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    machines = [cluster.add_node(num_cpus=1) for _ in range(2)]
    cluster.wait_for_nodes()
    print(cluster.address, flush=True)
    for _ in sys.stdin:
        cluster.remove_node(machines.pop(), allow_graceful=False)
        print("killed", flush=True)
        cluster.add_node(num_cpus=1)
    cluster.shutdown()


if __name__ == "__main__":
    main()
