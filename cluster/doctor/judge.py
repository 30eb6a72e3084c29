"""From facts and measurements to findings: what is good enough, and what to do where it is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from cluster.doctor.facts import NodeFacts
from cluster.doctor.findings import AllReduce, Finding, Level

OPEN_FILES = 65_536  # a stream is a socket or two; Ray's own advice is the same
OPEN_FILES_LEAST = 4_096
SHM_PER_GPU = 1 << 30  # NCCL's buffers between the cards of a node, with room to spare
SKEW_WARNING, SKEW_FAILURE = 0.5, 30.0  # seconds; certificates and tokens tolerate less than a minute
SLOW_NCCL = 5e9  # bytes/s between nodes: below, all-reduce takes longer than the rest of a step
ALL = "all nodes"


def unreachable(address: str, error: Exception) -> Finding:
    return Finding(
        "Ray", address, Level.FAILURE, str(error), "start it: `ray up CLUSTER.yaml`, or `ray start --head` here"
    )


def connection(nodes: list[dict[str, Any]], is_cluster: bool) -> Finding:
    alive, dead = [n for n in nodes if n["Alive"]], [n for n in nodes if not n["Alive"]]
    if not is_cluster:
        return Finding(
            "Ray", "this machine", Level.WARNING, "no cluster found; a private Ray was started to look at this machine",
            "on a cluster's node, or with --ray-address HOST:PORT, the cluster is examined",
        )  # fmt: skip
    if dead:
        gone = ", ".join(node["NodeManagerAddress"] for node in dead)
        advice = "expected after scaling down; else see `ray status` and the raylet's log there"
        return Finding("Ray", ALL, Level.WARNING, f"{len(alive)} alive, {len(dead)} gone: {gone}", advice)
    return Finding("Ray", ALL, Level.OK, f"{len(alive)} node{'s' if len(alive) > 1 else ''} alive")


def authentication(enabled: bool) -> Finding:
    if enabled:
        return Finding("authentication", ALL, Level.OK, "Ray asks for a token")
    advice = "`ray get-auth-token --generate`, copy ~/.ray/auth_token to every node, start Ray with RAY_AUTH_MODE=token"
    return Finding("authentication", ALL, Level.WARNING, "whoever reaches Ray's ports can run code", advice)


def silent(node: str, problem: str | None, timeout: float) -> Finding:
    if problem is None:
        return Finding(
            "runs actors", node, Level.FAILURE, f"no answer within {timeout:g} s",
            "see raylet.out and python-core-worker-*.log in /tmp/ray/session_latest/logs there",
        )  # fmt: skip
    advice = "install this checkout there with the same requirements.txt (setup_commands of ray_configs/clusters do)"
    return Finding("runs actors", node, Level.FAILURE, problem, advice)


def versions(facts: dict[str, NodeFacts]) -> Iterator[Finding]:
    """One finding for each package that is not the same everywhere, or one for all."""
    differs = False
    for name in next(iter(facts.values())).versions if facts else ():
        by_version: dict[str, list[str]] = {}
        for node, each in facts.items():
            by_version.setdefault(each.versions[name], []).append(node)
        if len(by_version) > 1 or "not installed" in by_version:
            differs = True
            detail = "; ".join(f"{version} on {', '.join(nodes)}" for version, nodes in by_version.items())
            level = Level.WARNING if name == "transformers" else Level.FAILURE
            yield Finding(f"{name} version", ALL, level, detail, "install the same requirements.txt on every node")
    if facts and not differs:
        shown = next(iter(facts.values())).versions
        yield Finding("versions", ALL, Level.OK, ", ".join(f"{name} {each}" for name, each in shown.items()))


def gpus(facts: dict[str, NodeFacts], resources: dict[str, dict[str, float]]) -> Iterator[Finding]:
    """Cards as Ray counts them against those the driver lists."""
    for node, each in facts.items():
        ray_has, driver_has = int(resources[node].get("GPU", 0)), len(each.gpus)
        kinds = ", ".join(f"{count} x {name}" for name, count in Counter(each.gpus).items())
        if "gpus" in each.errors:
            advice = "run nvidia-smi there; after a driver update the machine needs a restart"
            yield Finding("GPUs", node, Level.FAILURE, f"the driver fails: {each.errors['gpus']}", advice)
        elif ray_has > driver_has:
            yield Finding(
                "GPUs", node, Level.FAILURE, f"Ray offers {ray_has}, the driver lists {driver_has}",
                "do not set --num-gpus by hand; check nvidia-smi, and in containers the NVIDIA runtime",
            )  # fmt: skip
        elif ray_has < driver_has:
            yield Finding(
                "GPUs", node, Level.WARNING, f"Ray offers {ray_has} of {driver_has} ({kinds})",
                "start Ray without --num-gpus and without CUDA_VISIBLE_DEVICES to offer all",
            )  # fmt: skip
        elif driver_has:
            yield Finding("GPUs", node, Level.OK, f"{kinds}, driver {each.driver}")
        else:
            yield Finding("GPUs", node, Level.OK, "none")


def shared_memory(facts: dict[str, NodeFacts]) -> Iterator[Finding]:
    for node, each in facts.items():
        if "shared memory" in each.errors:
            yield Finding(
                "shared memory", node, Level.FAILURE, each.errors["shared memory"], "mount a tmpfs on /dev/shm"
            )
            continue
        need = SHM_PER_GPU * len(each.gpus) if len(each.gpus) > 1 else 0
        detail = f"{size(each.shm_free)} of {size(each.shm_total)} free in /dev/shm"
        advice = "docker: --shm-size=64g or --ipc=host; Kubernetes: an emptyDir with medium: Memory on /dev/shm"
        if each.shm_free < need:
            yield Finding("shared memory", node, Level.FAILURE, f"{detail}; {len(each.gpus)} GPUs need more", advice)
        elif each.shm_total <= 64 << 20:
            yield Finding("shared memory", node, Level.WARNING, f"{detail}: Ray falls back to disk", advice)
        else:
            yield Finding("shared memory", node, Level.OK, detail)


def limits(facts: dict[str, NodeFacts]) -> Iterator[Finding]:
    for node, each in facts.items():
        files = each.limits.nofile
        detail = f"open files {number(files)}, processes {number(each.limits.nproc)}, memlock {memlock(each)}"
        advice = "put `ulimit -n 65536` before `ray start`, or raise it in /etc/security/limits.conf"
        if 0 <= files < OPEN_FILES_LEAST:
            yield Finding("limits", node, Level.FAILURE, detail, advice)
        elif 0 <= files < OPEN_FILES:
            yield Finding("limits", node, Level.WARNING, detail, advice)
        else:
            yield Finding("limits", node, Level.OK, detail)


def model(name: str, facts: dict[str, NodeFacts]) -> Iterator[Finding]:
    """Readable everywhere, and the same everywhere."""
    sizes = {node: each.model.bytes for node, each in facts.items() if each.model is not None}
    common = Counter(sizes.values()).most_common(1)[0][0] if sizes else 0
    is_directory = name.startswith(("/", ".", "~"))
    for node, each in facts.items():
        files = each.model
        if files.problem is not None:
            level = Level.FAILURE if is_directory else Level.WARNING
            advice = (
                "put it on a file system that all nodes mount, or copy it to the same path everywhere"
                if is_directory
                else f"each rank's node will download it; `hf download {name}` there does it beforehand"
            )
            yield Finding("model", node, level, files.problem, advice)
        elif files.bytes != common:
            detail = f"{size(files.bytes)}, elsewhere {size(common)}"
            yield Finding("model", node, Level.FAILURE, detail, "another version or a broken copy: copy it again")
        else:
            yield Finding("model", node, Level.OK, f"{files.files} weight files, {size(files.bytes)}")


def clocks(skews: dict[str, tuple[float, float]]) -> Iterator[Finding]:
    for node, (ahead, error) in skews.items():
        certain = max(0.0, abs(ahead) - error)
        detail = f"{1000 * ahead:+.1f} ms (within {1000 * error:.1f} ms)"
        level = Level.FAILURE if certain > SKEW_FAILURE else Level.WARNING if certain > SKEW_WARNING else Level.OK
        advice = "" if level is Level.OK else "let chrony or systemd-timesyncd keep the time on every node"
        yield Finding("clock", node, level, detail, advice)


def busy_gpus(nodes: list[str]) -> Iterator[Finding]:
    if nodes:
        yield Finding(
            "NCCL", ", ".join(nodes), Level.WARNING, "not measured: every GPU there is in use",
            "run the doctor before the model is served",
        )  # fmt: skip


def pair(backend: str, first: str, second: str, result: AllReduce | str) -> Finding:
    """One measurement, or why there is none."""
    name, where = {"gloo": "gloo", "nccl": "NCCL"}[backend], f"{first} - {second}"
    if isinstance(result, str):
        advice = (
            f"open all TCP ports between {first} and {second}, both ways: "
            "ranks and Ray's workers use any above 1024; see that each node's own address is the one `ray status` shows"
        )
        if backend == "nccl":
            advice = "set NCCL_DEBUG=INFO for Ray's processes and run again; in containers see shared memory above"
        return Finding(name, where, Level.FAILURE, result, advice)
    detail = f"all-reduce {1000 * result.latency:.2f} ms (8 KiB), {result.bandwidth / 1e9:.2f} GB/s"
    if backend == "nccl" and first != second and result.bandwidth < SLOW_NCCL:
        advice = "keep each group on one node (tp_size up to its GPUs); else enable EFA, InfiniBand or GPUDirect"
        return Finding(name, where, Level.WARNING, detail + ": slow for TP over these nodes", advice)
    return Finding(name, where, Level.OK, detail)


def size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def number(limit: int) -> str:
    return "unlimited" if limit < 0 else f"{limit:,}"


def memlock(facts: NodeFacts) -> str:
    return "unlimited" if facts.limits.memlock < 0 else size(facts.limits.memlock)
