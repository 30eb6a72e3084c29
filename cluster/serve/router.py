"""Ray Serve's request router for engine replicas: the order comes from the ingress's `Fleet`.

Serve makes a router in each process that has a handle of the deployment, and runs it in an event loop of its own.
Requests carry their `Ticket`, the link to the fleet of their ingress; calls without one (status, metrics) go anywhere.
"""

from __future__ import annotations

import random

from ray.serve.request_router import PendingRequest, ReplicaID, ReplicaResult, RequestRouter, RunningReplica

from cluster.serve.fleet import Ticket

TICKET = "work"  # keyword of `EngineDeployment.generate`


class CacheAwareRouter(RequestRouter):
    """Serve tries the replicas one after the other, best first, until one is not at its limit of requests."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        ticket = _ticket(pending_request)
        if ticket is None:
            return [[replica] for replica in random.sample(candidate_replicas, len(candidate_replicas))]
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        return [[by_name[name]] for name in ticket.fleet.order(list(by_name), ticket)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        ticket = _ticket(pending_request)
        if ticket is not None:
            ticket.fleet.routed(ticket, replica_id.unique_id)


def _ticket(request: PendingRequest | None) -> Ticket | None:
    ticket = request.kwargs.get(TICKET) if request is not None else None
    return ticket if isinstance(ticket, Ticket) else None
