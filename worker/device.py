"""What differs between CPU and CUDA, behind one small interface: staging copies, streams, events, memory numbers.

On the CPU everything is synchronous and the "device" memory of a copy is the staging buffer itself. On CUDA a plan
travels on its own copy stream, work runs on one compute stream, results come back into pinned memory behind an event,
and the host waits for nothing but that event.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch

UPLOAD_BUFFERS = 2
DOWNLOAD_BUFFERS = 4
CGROUPS = (  # versions 2 and 1: folder, limit, usage, and what memory.stat calls reclaimable file cache
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


class Download(ABC):
    """Words on their way to the host."""

    @abstractmethod
    def wait(self) -> np.ndarray:
        """Block until they are there; the caller owns the returned int32 array."""


class Device(ABC):
    """One rank's device. `torch_device` is where its tensors live."""

    torch_device: torch.device
    supports_graphs: bool

    @abstractmethod
    def compute(self) -> AbstractContextManager[None]:
        """Make the compute stream current: everything a step launches goes there, in order."""

    @abstractmethod
    def upload(self, words: np.ndarray) -> torch.Tensor:
        """Copy an int32 array to the device: int32[len(words)], usable on the compute stream.

        The array may be reused when this returns; the tensor is valid until `release_upload` is followed by
        `UPLOAD_BUFFERS` more uploads.
        """

    @abstractmethod
    def release_upload(self) -> None:
        """The work launched so far is the last that reads the latest upload."""

    @abstractmethod
    def download(self, words: torch.Tensor) -> Download:
        """Start copying an int32[n] tensor to the host, after the work launched so far.

        At most `DOWNLOAD_BUFFERS` downloads may be waiting at a time.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all launched work. For start-up and shutdown only."""

    @abstractmethod
    def memory(self) -> tuple[int, int]:
        """(available, total) bytes of the memory that holds KV pages."""


def create_device(kind: str, index: int = 0, upload_words: int = 1 << 16, download_words: int = 1 << 12) -> Device:
    """The device of this rank; the sizes are where its staging buffers start (they grow when a plan is larger)."""
    if kind == "cuda":
        return CudaDevice(index, upload_words, download_words)
    return CpuDevice(upload_words)


class _Ready(Download):
    def __init__(self, words: np.ndarray) -> None:
        self._words = words

    def wait(self) -> np.ndarray:
        return self._words


class CpuDevice(Device):
    """Synchronous; one memcpy per plan so that its views outlive the caller's buffer."""

    def __init__(self, upload_words: int) -> None:
        self.torch_device = torch.device("cpu")
        self.supports_graphs = False
        self._buffers = [torch.empty(upload_words, dtype=torch.int32) for _ in range(UPLOAD_BUFFERS)]
        self._next = 0

    def compute(self) -> AbstractContextManager[None]:
        return nullcontext()

    def upload(self, words: np.ndarray) -> torch.Tensor:
        slot, self._next = self._next, (self._next + 1) % UPLOAD_BUFFERS
        if self._buffers[slot].numel() < len(words):
            self._buffers[slot] = torch.empty(2 * len(words), dtype=torch.int32)
        view = self._buffers[slot][: len(words)]
        view.numpy()[:] = words
        return view

    def release_upload(self) -> None:
        pass

    def download(self, words: torch.Tensor) -> Download:
        return _Ready(words.numpy())

    def synchronize(self) -> None:
        pass

    def memory(self) -> tuple[int, int]:
        return _host_memory()


class _UploadSlot:
    """A pinned buffer, its device twin, and the events that say when each may be rewritten."""

    def __init__(self, words: int, device: torch.device) -> None:
        self.host = torch.empty(words, dtype=torch.int32, pin_memory=True)
        self.device = torch.empty(words, dtype=torch.int32, device=device)
        self.copied = torch.cuda.Event()
        self.released = torch.cuda.Event()


class _CudaDownload(Download):
    def __init__(self, host: torch.Tensor, event: torch.cuda.Event) -> None:
        self._host, self._event = host, event

    def wait(self) -> np.ndarray:
        self._event.synchronize()
        return self._host.numpy().copy()


class CudaDevice(Device):
    """One card, one compute stream, one copy stream."""

    def __init__(self, index: int, upload_words: int, download_words: int) -> None:
        self.torch_device = torch.device("cuda", index)
        self.supports_graphs = True
        torch.cuda.set_device(self.torch_device)
        self.stream = torch.cuda.Stream(self.torch_device)
        self._copy_stream = torch.cuda.Stream(self.torch_device)
        self._uploads = [_UploadSlot(upload_words, self.torch_device) for _ in range(UPLOAD_BUFFERS)]
        self._upload = 0
        self._downloads = [
            (torch.empty(download_words, dtype=torch.int32, pin_memory=True), torch.cuda.Event(blocking=False))
            for _ in range(DOWNLOAD_BUFFERS)
        ]
        self._download = 0

    def compute(self) -> AbstractContextManager[None]:
        return torch.cuda.stream(self.stream)

    def upload(self, words: np.ndarray) -> torch.Tensor:
        self._upload = (self._upload + 1) % UPLOAD_BUFFERS
        slot = self._uploads[self._upload]
        count = len(words)
        if slot.host.numel() < count:
            # Rare: a plan larger than any before. The old buffers may still be read, so wait once.
            self.synchronize()
            slot = self._uploads[self._upload] = _UploadSlot(2 * count, self.torch_device)
        # Two plans ago this buffer was read by the copy engine: done long since, unless this rank lags far behind.
        slot.copied.synchronize()
        slot.host[:count].numpy()[:] = words
        with torch.cuda.stream(self._copy_stream):
            self._copy_stream.wait_event(slot.released)
            slot.device[:count].copy_(slot.host[:count], non_blocking=True)
            slot.copied.record(self._copy_stream)
        self.stream.wait_event(slot.copied)
        return slot.device[:count]

    def release_upload(self) -> None:
        self._uploads[self._upload].released.record(self.stream)

    def download(self, words: torch.Tensor) -> Download:
        self._download = (self._download + 1) % DOWNLOAD_BUFFERS
        host, event = self._downloads[self._download]
        if host.numel() < len(words):
            host = torch.empty(2 * len(words), dtype=torch.int32, pin_memory=True)
            self._downloads[self._download] = (host, event)
        host = host[: len(words)]
        host.copy_(words, non_blocking=True)
        event.record(self.stream)
        return _CudaDownload(host, event)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def memory(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self.torch_device)


def _host_memory() -> tuple[int, int]:
    """(available, total) bytes, also within a container's limit."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    available = os.sysconf("SC_AVPHYS_PAGES") * page
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux: free pages are a lower bound
    for folder, limit_file, usage_file, cache_name in CGROUPS:
        try:
            limit, used = (int((folder / name).read_text()) for name in (limit_file, usage_file))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):  # absent, or "max": no limit
            continue
        used -= int(stat.get(cache_name, 0))  # file cache that the kernel drops when memory is wanted
        total, available = min(total, limit), min(available, max(0, limit - used))
    return available, total
