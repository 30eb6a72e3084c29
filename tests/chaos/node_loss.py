"""Run by test_node_loss: a served engine whose ranks are all on a second Ray node, which dies.

With a new node in time the streams go on; without one every request gets a clear 503, and the service returns when a
node is added. Ranks are fake: they answer at once, and the same for the same request.
"""

from __future__ import annotations

import threading
import time

import ray
from ray import serve
from ray.cluster_utils import Cluster

from cluster.serve import build_openai_app
from tests.chaos.http_streams import Reader, wait_for_chunks
from tests.integration.http_server import Server, free_port, until

STORE = {"object_store_memory": 100 << 20}
CONFIG = {
    "device": "fake",
    "tp_size": 2,
    "page_size": 16,
    "num_pages": 4096,
    "max_seq_len": 8192,
    "max_running_requests": 16,
    "placement_timeout": 20,
    "max_recoveries": 3,
}
BODY = {"max_tokens": 6000, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
COUNT = 8


def main() -> None:
    cluster = Cluster()
    cluster.add_node(num_cpus=1, include_dashboard=False, **STORE)
    ray.init(address=cluster.address, log_to_driver=False)
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    app = build_openai_app(CONFIG)
    threading.Thread(target=lambda: serve.run(app, name="test", route_prefix="/"), daemon=True).start()
    until(lambda: "test" in serve.status().applications and states("engine").get("STARTING"), 60)
    server = Server(f"http://127.0.0.1:{port}", serve.get_deployment_handle("engine", "test"))
    time.sleep(3)  # both replicas have been placed on the only node there is
    node = cluster.add_node(num_cpus=2, **STORE)
    until(lambda: ready(server), 90)
    expected = [reader.result() for reader in start(server)]

    readers = start(server)
    wait_for_chunks(readers, 20)
    killed = time.monotonic()
    cluster.remove_node(node, allow_graceful=False)
    until(lambda: not ready(server), 30)
    print(f"/ready is 503 after {time.monotonic() - killed:.1f} s")
    node = cluster.add_node(num_cpus=2, **STORE)
    assert [reader.result() for reader in readers] == expected
    print(f"all streams ended well {time.monotonic() - killed:.1f} s after the node's death")
    assert ready(server)

    readers = start(server)
    wait_for_chunks(readers, 20)
    killed = time.monotonic()
    cluster.remove_node(node, allow_graceful=False)
    for reader in readers:
        reader.join(180)
        error = reader.chunks[-1]["error"]
        assert error["type"] == "service_unavailable" and "max_recoveries" in error["message"], error
        assert "the cluster has" in error["message"], error
    print(f"clear errors {time.monotonic() - killed:.1f} s after the node's death: {error['message']}")
    assert not ready(server)
    cluster.add_node(num_cpus=2, **STORE)
    added = time.monotonic()
    until(lambda: ready(server), 120)
    print(f"ready again {time.monotonic() - added:.1f} s after a node was added")
    assert [reader.result() for reader in start(server)] == expected
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()
    print("done")


def start(server: Server) -> list[Reader]:
    return [Reader(server, BODY | {"prompt": f"number {number}", "seed": number}) for number in range(COUNT)]


def ready(server: Server) -> bool:
    return server.get("/ready").status_code == 200


def states(deployment: str) -> dict[str, int]:
    overview = serve.status().applications["test"].deployments.get(deployment)
    return {} if overview is None else {str(state): count for state, count in overview.replica_states.items()}


if __name__ == "__main__":
    main()
