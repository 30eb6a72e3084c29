"""Run by test_placement_nodes: a group over two Ray nodes (two raylets on this machine), and the death of one."""

from __future__ import annotations

import time

import ray
from ray.cluster_utils import Cluster

from cluster.errors import PlacementError
from cluster.placement import place_ranks
from cluster.progress import no_progress
from cluster.rank_actors import start_rank_actors
from cluster.timeline import Timeline
from tests.integration.test_liveness import Service, assert_gone, make_group


def main() -> None:
    cluster = Cluster()
    small = {"object_store_memory": 100 << 20, "include_dashboard": False}
    cluster.add_node(num_cpus=1, **small)
    other = cluster.add_node(num_cpus=2, object_store_memory=100 << 20)
    ray.init(address=cluster.address, log_to_driver=False)
    here = ray.get_runtime_context().get_node_id()

    spread = place_ranks(3, {"CPU": 1.0}, timeout=60)
    assert [node == here for node in spread.nodes] == [True, False, False], spread
    spread.remove()

    group = make_group(3)
    service = Service(group)
    assert [rank.node_id == here for rank in group.info.ranks] == [True, False, False]
    schemes = [address.endpoint.split(":")[0] for address in group._transport.addresses]
    assert schemes == ["ipc", "tcp", "tcp"], schemes
    for number in range(1, 5):
        service.submit(number, list(range(number, number + 40)), 20)
    tokens = service.collect(4)
    assert all(len(row) == 20 for row in tokens.values())
    assert group.strangers == 0
    service.submit(9, list(range(1, 60)), 400)
    service.arrivals.get(timeout=60)
    start = time.monotonic()
    cluster.remove_node(other, allow_graceful=False)
    error = service.failure(60.0)
    print(f"node loss seen after {time.monotonic() - start:.2f} s: {error}")
    assert "rank 1" in str(error) or "rank 2" in str(error)
    assert_gone(service.pids)
    try:
        make_group(3).start(Timeline(no_progress))
    except PlacementError as error:
        print(error)
    else:
        raise AssertionError("placed on a node that is gone")
    lose_a_node_before_the_actors(cluster)
    ray.shutdown()
    cluster.shutdown()
    print("done")


def lose_a_node_before_the_actors(cluster: Cluster) -> None:
    """A node that goes between the reservation and the start of its actors: the group is placed again."""
    doomed = cluster.add_node(num_cpus=2, object_store_memory=100 << 20)
    cluster.wait_for_nodes()
    phases = []

    def progress(phase: str, fraction: float) -> None:
        phases.append(phase)
        if phases == ["placement", "actors"]:
            cluster.remove_node(doomed, allow_graceful=False)
            cluster.add_node(num_cpus=2, object_store_memory=100 << 20)

    deadline = time.monotonic() + 60
    started = start_rank_actors(3, {"CPU": 1.0}, 40.0, deadline, True, Timeline(progress), lambda: None)
    assert phases == ["placement", "actors"] * 2, phases
    assert tuple(place.node_id for place in started.places) == started.placement.nodes
    started.placement.remove()


if __name__ == "__main__":
    main()
