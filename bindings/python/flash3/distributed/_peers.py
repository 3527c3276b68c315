# SPDX-License-Identifier: Apache-2.0
"""Memory of the other ranks of a group that this one reads and writes itself, where one host has them all.

On GPUs it is torch's symmetric memory, and the copies are those of the copy engines: they take no multiprocessor from a kernel, as NCCL's
messages do. Copies run on a stream beside the current one. On CPUs it is memory that the processes share, and a copy is made at once.
"""
import contextlib
import hashlib
import math
import mmap
import os
import pathlib
import secrets
import socket

import torch
import torch.distributed as dist

from ._exchange import explained, gather_numbers

ALIGNMENT = 256  # bytes, of what a region holds
_GROWTH = 1.25  # so that batches of growing lengths do not each make a new region
_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")


def number_of(text):
    """63 bits that stand for a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def host_number():
    return number_of(_BOOT_ID.read_text(encoding="ascii") if _BOOT_ID.exists() else socket.gethostname())


class Peers:
    """A region of as many bytes on each rank, which all ranks of the group see. Calls of it are made by all ranks alike.

    DevicePeers says what begin(), end(), barrier(), beside(), mark() and wait() are for. HostPeers, which does at once what it is told, has
    nothing to wait for but the other ranks.
    """

    def __init__(self, group, device):
        self.group, self.device = group, device
        self.rank, self.ranks = group.rank(), group.size()
        self.size, self._regions = 0, []

    def reserve(self, size):
        """Makes regions at least this large. What was in them is lost where they grow."""
        if size <= self.size:
            return
        grown = -(-max(size, int(_GROWTH * self.size)) // mmap.PAGESIZE) * mmap.PAGESIZE
        self.size, self._regions = 0, []  # until there are new ones, also where making them fails
        self._regions = self._make(grown)
        self.size = grown

    def part(self, rank, offset, dtype, shape):
        """A tensor in the region of a rank, from a byte on."""
        return self._regions[rank][offset:offset + dtype.itemsize * math.prod(shape)].view(dtype).view(shape)


class DevicePeers(Peers):
    """GPUs of one host that reach each other's memory."""

    def __init__(self, group, device):
        super().__init__(group, device)
        self._stream, self._ended = torch.cuda.Stream(device, priority=-1), None
        self._handle, self._is_captured, self._of_graphs = None, False, []
        timeout = group._get_backend(device).options._timeout
        self._timeout_ms = int(1000 * timeout.total_seconds())

    def _make(self, size):
        from torch.distributed import _symmetric_memory
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"method = 'all_gather' needs {size} bytes that ranks share but a CUDA graph is being captured; make the call "
                               "once before")
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group)  # what is given back is no longer read
        if self._is_captured:  # graphs go on with the memory that they know
            self._of_graphs.append(self._handle)
        self._handle = None
        own = _symmetric_memory.empty(size, dtype=torch.uint8, device=self.device)
        self._handle = _symmetric_memory.rendezvous(own, self.group)
        return [self._handle.get_buffer(rank, (size,), torch.uint8) for rank in range(self.ranks)]

    def begin(self):
        """What the current stream does from now on comes after the last call, which may have been on another stream. A CUDA graph knows
        nothing of streams outside of it: the caller orders a replay after other calls of the group."""
        if torch.cuda.is_current_stream_capturing():
            self._is_captured = True
        elif self._ended is not None:
            self.wait(self._ended)

    def end(self):
        if not torch.cuda.is_current_stream_capturing():
            self._ended = self.mark()

    def barrier(self):
        """What the current streams of all ranks do from now on comes after what they did before. A rank that does not come is an error of
        the device after the group's time-out."""
        self._handle.barrier(0, self._timeout_ms)

    def beside(self):
        """A context: copies on a stream of their own."""
        return torch.cuda.stream(self._stream)

    def mark(self):
        """Where the current stream is: what wait() takes."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, mark):
        """What the current stream does from now on comes after the mark."""
        torch.cuda.current_stream(self.device).wait_event(mark)


class HostPeers(Peers):
    """Processes of one host, with tensors on the CPU."""

    def _make(self, size):
        made, token = os.memfd_create("flash3"), secrets.randbits(62)
        try:
            os.truncate(made, size)
            os.pwrite(made, token.to_bytes(8, "little"), 0)
            table = gather_numbers([os.getpid(), made, token], [self.group], self.device)
            try:
                return [self._opened(f"/proc/{pid}/fd/{file}", size, token) for pid, file, token in table]
            finally:
                self.barrier()  # all have opened it, or have failed
        finally:
            os.close(made)

    @staticmethod
    def _opened(path, size, token):
        file = os.open(path, os.O_RDWR)
        try:
            if os.pread(file, 8, 0) != token.to_bytes(8, "little"):  # of another namespace of processes
                raise OSError(f"{path} is not the memory of another rank")
            return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
        finally:
            os.close(file)

    def barrier(self):
        with explained("waiting for the other ranks", self.group):
            dist.barrier(self.group)

    def begin(self):
        pass

    end = begin

    def beside(self):
        return contextlib.nullcontext()

    def mark(self):
        pass

    def wait(self, mark):
        pass


_made = {}  # by the name of a group and a device: (the group, Peers or why there are none)


def peers_of(group, device):
    """The Peers of a group, or why it has none: the same on all ranks, which must ask alike. Asks the other ranks the first time."""
    device = torch.device(device)
    kept = known(group, device)
    if kept is None:
        kept = _peers_or_reason(group, device)
        _made[group.group_name, device] = group, kept
    return kept


def known(group, device):
    """What peers_of() gave for the group; None: it has not been asked."""
    of, kept = _made.get((group.group_name, torch.device(device)), (None, None))
    return kept if of is group else None


def _peers_or_reason(group, device):
    kind = DevicePeers if device.type == "cuda" else HostPeers
    lacks = kind is HostPeers and not hasattr(os, "memfd_create")
    gpu = number_of(str(torch.cuda.get_device_properties(device).uuid)) if kind is DevicePeers else group.rank()
    table = gather_numbers([host_number(), lacks, gpu], [group], device)
    for rank, (host, lacks, gpu) in enumerate(table):
        if host != table[0][0]:
            return f"rank {rank} is on another host than rank 0"
        if lacks:
            return f"rank {rank} has no os.memfd_create"
        if gpu in [row[2] for row in table[:rank]]:
            return f"rank {rank} has the GPU of a rank before it"
    peers, reason = kind(group, device), ""
    try:
        peers.reserve(mmap.PAGESIZE)
    except (RuntimeError, OSError) as error:
        reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
    for rank, (failed,) in enumerate(gather_numbers([bool(reason)], [group], device)):
        if failed:
            return reason or f"rank {rank} does not reach the others' memory"
    return peers
