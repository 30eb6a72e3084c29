"""Run by ray_up_scenario on the head: takes one CPU of every worker host, so that two ranks fit on no single one."""

from __future__ import annotations

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


class Filler:
    """Holds a CPU until the cluster ends."""

    def where(self) -> str:
        return ray.util.get_node_ip_address()


if __name__ == "__main__":
    ray.init(address="auto", log_to_driver=False)
    actors = [
        ray.remote(Filler)
        .options(
            num_cpus=1,
            name=f"filler-{node['NodeID']}",
            lifetime="detached",
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )
        .remote()
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("CPU")
    ]
    print("one CPU less on", *ray.get([actor.where.remote() for actor in actors], timeout=60))
