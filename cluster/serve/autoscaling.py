"""A policy for Serve's autoscaler: so many outstanding tokens to a replica.

Serve's own policy counts open requests, but one request may be 20 tokens of work and the next 100,000. In a Serve file,
below the engine deployment's `autoscaling_config`::

    policy:
      policy_function: cluster.serve.autoscaling:OutstandingTokens
      policy_kwargs: {target: 20000}

Bounds, delays and the look-back period are those of `autoscaling_config`; `downscale_delay_s` should be well above
`metrics_interval_s`. Serve sends the controller this
module by value, so it imports nothing of ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

METRIC = "outstanding_tokens"


class OutstandingTokens:
    """Replicas for the work there is, `target` tokens each; see `cluster.routing.work_of` for what counts.

    Requests that no replica has taken yet want one at least, so that the first wakes a deployment that was scaled to
    zero. While a replica has not reported, which takes up to `metrics_interval_s` (10 s), nothing shrinks.

    Raises ValueError for a target that is not positive.
    """

    def __init__(self, target: float) -> None:
        if not target > 0:
            raise ValueError(f"target must be a positive number of tokens, got {target}")
        self._target = target

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        by_replica = (context.aggregated_metrics or {}).get(METRIC, {})
        wanted = sum(by_replica.values()) / self._target
        if context.total_queued_requests:
            wanted = max(wanted, 1.0)
        if len(by_replica) < context.current_num_replicas:
            wanted = max(wanted, float(context.current_num_replicas))
        return wanted, {}
