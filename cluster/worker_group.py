"""`WorkerGroup`: the ranks of one model copy as one thing that starts, takes plans, answers, fails and stops."""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # the builtin only since Python 3.11
from dataclasses import dataclass, replace
from functools import partial

import ray

from cluster import messages
from cluster.errors import EngineDeadError, StartupError, TransportError
from cluster.group_place import GroupPlace
from cluster.handshake import GroupInfo, Handshake
from cluster.local_processes import end_ray_workers
from cluster.rank_startup import RankSpec, RunnerFactory, Whereabouts, make_model_runner
from cluster.ray_errors import explain
from cluster.timeline import Timeline
from cluster.transport import DriverTransport, Frame
from scheduler.step import StepPlan, StepResult
from worker.config import WorkerConfig

logger = logging.getLogger(__name__)

# A collective fails on the survivors before Ray reports the death that caused it: wait for the better explanation.
_DIAGNOSIS_TIME = 0.3
_LAST_WORDS_TIME = 5.0  # as long as a rank lets its last message take to leave
_NEWS_TIME = 2.0  # until Ray tells of the end of a rank that cannot be reached
_STOP_GRACE = 5.0
_KILL_GRACE = 0.5
_END_TIMEOUT = 10.0


@dataclass(frozen=True, slots=True)
class GroupConfig:
    """What a group is made of. `worker` is rank 0's configuration; the ranks' differ in `tp_rank` and `local_ranks`.

    `resources` is one rank's bundle, such as {"CPU": 1.0}. Times are seconds. `spare_modules`: what spare ranks import
    while they wait; None: there are none.
    """

    worker: WorkerConfig
    resources: dict[str, float]
    backend: str
    placement_timeout: float
    start_timeout: float
    step_timeout: float
    may_grow: bool = True
    make_runner: RunnerFactory = make_model_runner
    spare_modules: tuple[str, ...] | None = None


class WorkerGroup:
    """Placement group, actors and transport of one group.

    `start` and `stop` may be called again and again from the same process: each start makes a new placement group,
    new actors, new sockets and a new process group, with as many pages as the first. After `stop_ranks` it keeps the
    placement group and takes the spare ranks, if there are any. `wake`, `strangers` and `spares_ready` are thread-safe;
    everything else belongs to one thread at a time.
    """

    def __init__(self, config: GroupConfig) -> None:
        self.config = config
        self.size = config.worker.tp_size
        self.info: GroupInfo | None = None
        self._place = GroupPlace(
            self.size, config.resources, config.may_grow, config.backend == "nccl", config.spare_modules
        )
        self._actors: list[ray.actor.ActorHandle] = []
        self._ranks: tuple[Whereabouts, ...] = ()
        self._here = ""  # id of the driver's node
        self._runs: list[Future] = []
        self._ended: deque[int] = deque()  # ranks whose run() came back; filled by Ray's callback thread
        self._transport: DriverTransport | None = None
        self._strangers = 0

    @property
    def strangers(self) -> int:
        """Messages from outside the group that were dropped, over all starts. Thread-safe."""
        transport = self._transport
        return self._strangers + (transport.strangers if transport else 0)

    @property
    def spares_ready(self) -> bool:
        """Whether spare ranks wait, with everything imported. Thread-safe."""
        return self._place.spares_ready

    def start(self, timeline: Timeline, check: Callable[[], None] = lambda: None) -> GroupInfo:
        """Bring the group up; returns when every rank is ready for steps. `check` is called about every second of
        waiting for a place or for ranks, and gives up by raising.

        Raises:
            PlacementError: no room. ConfigError, ModelLoadError: a rank says so. StartupError: anything else, with
            rank, phase and cause. Nothing is left behind then.
        """
        deadline = time.monotonic() + self.config.start_timeout
        try:
            self._here = ray.get_runtime_context().get_node_id()
            timeout = min(self.config.placement_timeout, self.config.start_timeout)
            started = self._place.start_actors(timeout, deadline, timeline, check)
            self._actors, self._ranks = started.actors, started.places
            timeline.enter("ranks")
            self._run_ranks(deadline)
            info = self._bring_up(timeline, deadline, check)
            if self.info is not None and replace(info, ranks=()) != replace(self.info, ranks=()):
                raise StartupError(f"the model or its memory changed since the last start: {self.info}, now {info}")
            self.info = info
        except BaseException:
            self.stop(grace=0.0)
            raise
        return self.info

    def settled(self) -> None:
        """Nobody waits for what the last start interrupted: spare ranks may take the processor, soon."""
        self._place.add_spares(self._ranks)

    def send_plan(self, plan: StepPlan) -> None:
        """Send a sealed plan to every rank; its buffer may be reused afterwards. Raises EngineDeadError."""
        self._broadcast(messages.PLAN, plan.buffer)

    def ping(self, number: int) -> None:
        """Ask every rank for a collective and an answer; `poll` reports the answers as `Pong`."""
        self._broadcast(messages.CONTROL, messages.encode(messages.Ping(number)))

    def poll(self, timeout: float | None) -> list[StepResult | tuple[int, messages.Pong]]:
        """What arrived within `timeout` seconds (None: for ever): results in step order, and (rank, Pong).

        Raises:
            EngineDeadError: a rank died, gave up, or sent what it should not; says which and why.
        """
        arrived: list[StepResult | tuple[int, messages.Pong]] = []
        for frame in self._transport.poll(timeout):
            if frame.kind == messages.RESULT:
                try:
                    arrived.append(StepResult.decode(frame.body))
                except ValueError as error:
                    raise EngineDeadError(f"rank {frame.rank} sent a damaged result: {error}") from error
                continue
            message = self._decode(frame)
            if isinstance(message, messages.Pong):
                arrived.append((frame.rank, message))
            else:
                raise self._diagnose(frame.rank, message)
        if self._ended:
            raise self._diagnose()
        return arrived

    def wake(self) -> None:
        """Make `poll` return. Thread-safe."""
        transport = self._transport
        if transport is not None:
            transport.wake()

    def stop(self, grace: float = _STOP_GRACE) -> None:
        """End every rank and give everything back; returns when the processes are gone. Safe to call twice.

        With `grace` seconds the ranks are asked to leave their loops first; after a failure (0) they are killed.
        """
        if self._transport is not None and grace > 0:
            self._ask_to_stop(grace)
        self.stop_ranks(grace)
        self._place.give_back()

    def stop_ranks(self, grace: float = 0.0) -> None:
        """End every rank, but keep their place and the spare ranks; returns when the processes are gone."""
        if ray.is_initialized():  # otherwise Ray has ended everything already
            for actor in self._actors:
                ray.kill(actor, no_restart=True)
            local = [rank.pid for rank in self._ranks if rank.node_id == self._here]
            end_ray_workers(local, max(grace, _KILL_GRACE))
        deadline = time.monotonic() + _END_TIMEOUT
        for rank, run in enumerate(self._runs):
            try:
                run.exception(max(0.0, deadline - time.monotonic()))
            except FutureTimeoutError:
                logger.error("rank %d on %s did not end", rank, self._ranks[rank].node_ip)
                self._place.give_back()
        if self._transport is not None:
            self._strangers += self._transport.strangers
            self._transport.close()
        self._transport = None
        self._actors, self._runs, self._ranks = [], [], ()
        self._ended = deque()  # a new one: a straggler's callback writes to the old

    # -- start-up ------------------------------------------------------------------------------------------------

    def _run_ranks(self, deadline: float) -> None:
        local = [rank.node_id == self._here for rank in self._ranks]
        self._transport = DriverTransport(local, ray.util.get_node_ip_address())
        self._group_id = secrets.token_hex(8)
        for number, (actor, place) in enumerate(zip(self._actors, self._ranks, strict=True)):
            cards = self._place.visible_cards(place, self._ranks)
            spec = RankSpec(
                group=self._group_id,
                address=self._transport.addresses[number],
                worker=replace(
                    self._worker(),
                    tp_rank=number,
                    local_ranks=sum(other.node_id == place.node_id for other in self._ranks),
                    device_index=cards.index(place.gpu_ids[0]) if cards else 0,
                ),
                visible_gpus=cards,
                backend=self.config.backend,
                node_ip=place.node_ip,
                start_timeout=max(0.0, deadline - time.monotonic()),
                step_timeout=self.config.step_timeout,
            )
            run = actor.run.remote(spec, self.config.make_runner).future()
            run.add_done_callback(partial(self._on_run_ended, self._ended, number))
            self._runs.append(run)

    def _worker(self) -> WorkerConfig:
        """A later start gets the pages of the first, since that is what the scheduler plans with."""
        worker = self.config.worker
        return worker if self.info is None else replace(worker, num_pages=self.info.num_pages, pages_fitted=True)

    def _on_run_ended(self, ended: deque[int], rank: int, run: Future) -> None:
        ended.append(rank)
        self.wake()

    def _bring_up(self, timeline: Timeline, deadline: float, check: Callable[[], None]) -> GroupInfo:
        handshake = Handshake(self._group_id, self._ranks, self._worker(), timeline, self._send)
        while handshake.missing:
            check()
            if time.monotonic() >= deadline:
                raise handshake.late(self.config.start_timeout)
            self._take_startup_messages(handshake, min(deadline - time.monotonic(), 1.0))  # short: Ctrl-C is heard
            if self._ended:
                rank = self._ended[0]
                if self._runs[rank].exception() is None:  # it gave up, and what it said of that may be behind
                    until = time.monotonic() + _LAST_WORDS_TIME
                    while (left := until - time.monotonic()) > 0:
                        self._take_startup_messages(handshake, left)
                raise handshake.died(rank, self._cause_of_end(rank))
        return handshake.info()

    def _take_startup_messages(self, handshake: Handshake, timeout: float) -> None:
        for frame in self._transport.poll(timeout):
            handshake.take(frame.rank, self._decode(frame))

    # -- failures ------------------------------------------------------------------------------------------------

    def _diagnose(self, rank: int | None = None, message: messages.Message | None = None) -> EngineDeadError:
        """The best explanation of a failure: a death if there was one, else the first complaint."""
        deadline = time.monotonic() + _DIAGNOSIS_TIME
        while not self._deaths() and (left := deadline - time.monotonic()) > 0:
            for frame in self._transport.poll(left):
                if message is None and frame.kind == messages.CONTROL:
                    rank, message = frame.rank, self._decode(frame)
        if deaths := self._deaths():
            number = deaths[0]
            place = self._ranks[number]
            return EngineDeadError(
                f"rank {number} (pid {place.pid} on {place.node_ip}) died: {self._cause_of_end(number)}"
            )
        if isinstance(message, messages.Failed):
            return EngineDeadError(f"rank {rank} failed in phase {message.phase!r}: {message.message}")
        if message is not None:
            return EngineDeadError(f"rank {rank} sent {type(message).__name__} while serving")
        return EngineDeadError(f"rank {self._ended[0]} left its loop without being asked")

    def _deaths(self) -> list[int]:
        return [rank for rank in self._ended if self._runs[rank].exception() is not None]

    def _cause_of_end(self, rank: int) -> str:
        error = self._runs[rank].exception()
        return explain(error) if error is not None else "it left its loop without being asked"

    def _decode(self, frame: Frame) -> messages.Message:
        if frame.kind != messages.CONTROL:
            raise EngineDeadError(f"rank {frame.rank} sent a frame of unknown kind {frame.kind!r}")
        try:
            return messages.decode(frame.body)
        except TransportError as error:
            raise EngineDeadError(f"rank {frame.rank} broke the protocol: {error}") from error

    def _send(self, rank: int, message: messages.Message) -> None:
        self._transport.send(rank, messages.CONTROL, messages.encode(message))

    def _broadcast(self, kind: bytes, body: bytes | memoryview) -> None:
        try:
            for rank in range(self.size):
                self._transport.send(rank, kind, body)
        except TransportError as error:
            if self._wait_for_end():
                raise self._diagnose() from error
            raise EngineDeadError(f"{error}; its node or the network is down") from error

    # -- stopping ------------------------------------------------------------------------------------------------

    def _wait_for_end(self) -> bool:
        """True if some rank's run() has ended, or is heard to have ended within `_NEWS_TIME`."""
        deadline = time.monotonic() + _NEWS_TIME
        while not self._ended and time.monotonic() < deadline:
            time.sleep(0.005)
        return bool(self._ended)

    def _ask_to_stop(self, grace: float) -> None:
        for rank in range(self.size):
            try:
                self._send(rank, messages.Stop())
            except TransportError as error:
                logger.debug("stop: %s", error)
        deadline = time.monotonic() + grace
        while len(self._ended) < len(self._runs) and (left := deadline - time.monotonic()) > 0:
            self._transport.poll(left)
