"""Hosts on one machine: each with its own network, processes, hostname, home, /tmp/ray and ssh server.

::

    operator (10.213.0.1) --- bridge --- head (.10)
                                    +--- worker (.11) ...

A host is a network namespace and, in it, a process namespace whose first process is sshd's parent. What runs inside
sees nobody else's processes, so `ray stop` and `ray down` reach none of them, and when the first process ends the
kernel ends all others. Needs root, iproute2, util-linux, openssh-server and rsync.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

NETWORK = "10.213.0"
SSHD = "/usr/sbin/sshd"
_PROGRAMS = ("ip", "unshare", "nsenter", "mount", "ssh", "ssh-keygen", "rsync")
_START_TIMEOUT = 20.0


def what_is_missing() -> str | None:
    """Why hosts cannot be made here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None] + ([] if Path(SSHD).exists() else ["sshd"])
    if missing:
        return f"not installed: {', '.join(missing)}"
    probe = subprocess.run(["unshare", "--net", "--pid", "--mount", "--uts", "--fork", "true"], capture_output=True)
    return None if probe.returncode == 0 else f"no namespaces here: {probe.stderr.decode().strip()}"


@dataclass(frozen=True)
class Host:
    """A running host. `init` is the process, as we see it, that is number 1 inside."""

    name: str
    address: str
    home: Path
    init: int

    def command(self, *arguments: str) -> list[str]:
        """A command line that runs `arguments` inside, in the host's home's environment."""
        inside = ["nsenter", f"--target={self.init}", "--net", "--pid", "--mount", "--uts"]
        variables = [f"{name}={value}" for name, value in os.environ.items() if not name.startswith("RAY_")]
        return [*inside, "env", "-i", *variables, f"HOME={self.home}", *arguments]


@dataclass(frozen=True)
class Lab:
    """The hosts by name; `operator` is where `ray up` runs, the only one without an ssh server's need."""

    operator: Host
    hosts: dict[str, Host]
    key: Path


@contextmanager
def lab(directory: Path, names: Sequence[str]) -> Iterator[Lab]:
    """Hosts of these names, reachable by ssh with `Lab.key` as root. All of it is gone afterwards."""
    prefix = f"raydix{os.getpid()}"
    key = directory / "key"
    _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key))
    with ExitStack() as stack:
        switch = f"{prefix}-operator"
        stack.enter_context(_namespace(switch))
        _in(switch, "ip", "link", "add", "bridge", "type", "bridge")
        _in(switch, "ip", "address", "add", f"{NETWORK}.1/24", "dev", "bridge")
        _in(switch, "ip", "link", "set", "bridge", "up")
        operator = stack.enter_context(_host(directory, switch, "operator", f"{NETWORK}.1", key))
        hosts = {}
        for number, name in enumerate(names):
            namespace, address = f"{prefix}-{name}", f"{NETWORK}.{10 + number}"
            stack.enter_context(_namespace(namespace))
            _in(switch, "ip", "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _in(switch, "ip", "link", "set", name, "master", "bridge", "up")
            _in(namespace, "ip", "address", "add", f"{address}/24", "dev", "eth0")
            _in(namespace, "ip", "link", "set", "eth0", "up")
            _in(namespace, "ip", "route", "add", "default", "via", f"{NETWORK}.1")  # Ray finds its address by it
            hosts[name] = stack.enter_context(_host(directory, namespace, name, address, key))
        yield Lab(operator, hosts, key)


def plug(name: str, connected: bool) -> None:
    """Pull a host's network cable, or put it back. To be called on the operator."""
    _run("ip", "link", "set", name, "up" if connected else "down")


@contextmanager
def _namespace(name: str) -> Iterator[None]:
    _run("ip", "netns", "add", name)
    try:
        _in(name, "ip", "link", "set", "lo", "up")
        yield
    finally:
        for pid in _run("ip", "netns", "pids", name).split():  # of a host that was not ended in good order
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _run("ip", "netns", "delete", name)


@contextmanager
def _host(directory: Path, namespace: str, name: str, address: str, key: Path) -> Iterator[Host]:
    own, home = directory / name, directory / "home"  # inside, `own` is seen at the same place on every host
    home.mkdir(exist_ok=True)
    (own / ".ssh").mkdir(parents=True)
    (own / ".ssh/authorized_keys").write_text(key.with_suffix(".pub").read_text())
    (own / ".bashrc").touch()
    passwd = own / "passwd"
    passwd.write_text(f"root:x:0:0:root:{home}:/bin/bash\nsshd:x:65533:65534::/run/sshd:/bin/false\n")
    _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(own / "host_key"))
    (own / "sshd_config").write_text(
        f"HostKey {own}/host_key\nPidFile none\nUsePAM no\nStrictModes no\nPasswordAuthentication no\n"
        f"AuthorizedKeysFile {own}/.ssh/authorized_keys\nMaxStartups 100\nMaxSessions 100\nPermitRootLogin yes\n"
    )
    (own / "start").write_text(
        "set -e\n"
        f"hostname {name}\n"
        f"mount --bind {passwd} /etc/passwd\n"
        f"mount --bind {own} {home}\n"
        "mkdir -p /tmp/ray /run/sshd\n"
        "mount -t tmpfs tmpfs /tmp/ray\n"
        "mount -t tmpfs -o mode=755 tmpfs /run/sshd\n"
        "mount -t tmpfs tmpfs /dev/shm\n"
        f"{SSHD} -D -e -f {own}/sshd_config &\n"
        f"touch {own}/started\n"
        "wait\n"
    )
    unshare = ["unshare", "--pid", "--mount", "--uts", "--fork", "--mount-proc", "--kill-child"]
    with (own / "host.log").open("wb") as log:
        parent = subprocess.Popen(
            ["ip", "netns", "exec", namespace, *unshare, "bash", str(own / "start")],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield Host(name, address, home, _first_process(parent, own))
    finally:
        parent.kill()  # its child is the namespace's first process, which goes with it and takes all others along
        parent.wait()


def _first_process(parent: subprocess.Popen[bytes], directory: Path) -> int:
    deadline = time.monotonic() + _START_TIMEOUT
    while not (directory / "started").exists():
        assert parent.poll() is None and time.monotonic() < deadline, (directory / "host.log").read_text()
        time.sleep(0.05)
    (child,) = psutil.Process(parent.pid).children()
    return child.pid


def _in(namespace: str, *command: str) -> str:
    return _run("ip", "netns", "exec", namespace, *command)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


if __name__ == "__main__":  # a look inside: python -m tests.integration.hosts DIRECTORY COMMAND...
    with lab(Path(sys.argv[1]), ["head", "first", "second"]) as made:
        subprocess.run(made.operator.command(*sys.argv[2:]), check=False)
