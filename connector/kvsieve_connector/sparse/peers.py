"""Ranks of one tensor-parallel group that reach one another's GPUs.

Their main planes are the same, so each fetches its share of the missing rows from the arena, and reads the
others' from their hot buffers (docs/decisions/0015-sharded-fetch.md). They exchange the addresses once, when
the caches are registered, and try them out. Every step of that succeeds on all ranks or fails on all: no
rank waits for one that fetches for itself.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from vllm.logger import init_logger

from kvsieve_connector.kernels.tables import LayerCache, Peers
from kvsieve_connector.settings import PREFIX

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from kvsieve_connector.settings import ConnectorSettings
    from kvsieve_connector.sparse.prefetch import Policy
    from kvsieve_connector.sparse.tables import HostTables

logger = init_logger("vllm.kvsieve")

T = TypeVar("T")
Exchange = Callable[[Any], list[Any]]
"""Gives every rank's value to every rank, in order of rank."""

_PROBE_BYTES = 16
_MEMCPY_DEFAULT = 4
_LAZY_PEER_ACCESS = 1


class Unshared(Exception):
    """Each rank fetches for itself, and why."""


class Memory(Protocol):
    """Device memory that processes of one host lend one another. Any exception is a reason not to."""

    def lend(self, address: int) -> tuple[bytes, int]:
        """A handle of the allocation, and the address's offset in it."""

    def open(self, handle: bytes) -> int:
        """Where another process's allocation is in this one; the same for the same handle."""

    def read(self, address: int, size: int) -> bytes: ...

    def write(self, address: int, data: bytes) -> None:
        """Done when it returns."""

    def close(self) -> None:
        """Gives back what open() has mapped."""


class CudaMemory:
    """By CUDA's IPC handles, with the current device. Of torch's allocator, without expandable segments."""

    def __init__(self) -> None:
        self._runtime = import_module("cupy").cuda.runtime
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._opened: dict[bytes, int] = {}

    def lend(self, address: int) -> tuple[bytes, int]:
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        error = self._driver.cuMemGetAddressRange_v2(
            ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
        )
        if error:
            raise RuntimeError(f"cuMemGetAddressRange: error {error} for address {address:#x}")
        return bytes(self._runtime.ipcGetMemHandle(base.value)), address - base.value

    def open(self, handle: bytes) -> int:
        if handle not in self._opened:
            self._opened[handle] = int(self._runtime.ipcOpenMemHandle(handle, _LAZY_PEER_ACCESS))
        return self._opened[handle]

    def read(self, address: int, size: int) -> bytes:
        data = ctypes.create_string_buffer(size)
        self._runtime.memcpy(ctypes.addressof(data), address, size, _MEMCPY_DEFAULT)
        return data.raw

    def write(self, address: int, data: bytes) -> None:
        source = ctypes.create_string_buffer(data, len(data))
        self._runtime.memcpy(address, ctypes.addressof(source), len(data), _MEMCPY_DEFAULT)
        self._runtime.deviceSynchronize()

    def close(self) -> None:
        while self._opened:
            self._runtime.ipcCloseMemHandle(self._opened.popitem()[1])


@dataclass(frozen=True)
class _Offer:
    """host: of its kernel's start. shape: what has to be equal. lent: by layer, handle and offset of cache,
    slot_of and flags."""

    host: str
    shape: tuple[Any, ...]
    lent: list[list[tuple[bytes, int]]]


def connect(
    rank: int,
    count: int,
    exchange: Exchange,
    memory: Memory,
    caches: Sequence[LayerCache],
    tables: HostTables,
) -> list[Peers]:
    """What the kernels need to know of the other ranks, by layer. All call it at once, before any request.

    rank: of this one, of `count`. caches: in the same order on every rank.
    Raises Unshared, on all ranks or on none.
    """
    device = caches[0].cache.device
    slots = tables.tag.shape[1]
    flags = _on_each(
        exchange, lambda: torch.zeros(len(caches), slots, count, dtype=torch.int64, device=device)
    )
    own = [
        (cache.cache.data_ptr(), cache.slot_of.data_ptr(), flags[i].data_ptr())
        for i, cache in enumerate(caches)
    ]
    before: list[list[bytes]] = []

    def offer() -> _Offer:
        _synchronize(device)
        before.extend([memory.read(address, _PROBE_BYTES) for address in layer[:2]] for layer in own)
        lent = [[memory.lend(address) for address in layer] for layer in own]
        shape = tuple((tuple(c.cache.shape), c.cache.stride(), c.slot_of.numel(), slots) for c in caches)
        for places, layer in zip(lent, own, strict=True):
            for place, address in zip(places[:2], layer, strict=False):
                memory.write(address, _probe(place))
        return _Offer(_boot_id(), shape, lent)

    def reach(offers: list[_Offer]) -> list[list[list[int]]]:
        """Addresses by layer and rank. The first two of each are read; the last one, flags, is written to."""
        places = []
        for i in range(len(caches)):
            layer = []
            for other, theirs in enumerate(offers):
                if other == rank:
                    layer.append(list(own[i]))
                    continue
                lent = theirs.lent[i]
                at = [memory.open(handle) + offset for handle, offset in lent]
                for place, address in zip(lent[:2], at, strict=False):
                    if memory.read(address, _PROBE_BYTES) != _probe(place):
                        raise RuntimeError(f"rank {other}'s memory is not what it was said to be")
                memory.write(at[2] + 8 * rank, _probe(lent[2], rank)[:8])
                layer.append(at)
            places.append(layer)
        return places

    def written(lent: list[list[tuple[bytes, int]]]) -> None:
        for places, layer in zip(lent, own, strict=True):
            for other in range(count):
                if other != rank and memory.read(layer[2] + 8 * other, 8) != _probe(places[2], other)[:8]:
                    raise RuntimeError(f"what rank {other} wrote to this one has not arrived")

    def restore() -> None:
        for layer, data in zip(own, before, strict=False):
            for address, was in zip(layer[:2], data, strict=True):
                memory.write(address, was)
        flags.zero_()
        _synchronize(device)

    failure: Unshared | None = None
    try:
        offers = _together(exchange, offer)
        if len({o.host for o in offers}) > 1:
            raise Unshared("the ranks are on several hosts")
        if len({o.shape for o in offers}) > 1:
            raise Unshared("the ranks' caches differ in shape")
        places = _together(exchange, lambda: reach(offers))[rank]
        _together(exchange, lambda: written(offers[rank].lent))
    except Unshared as error:
        failure = error
    _together(exchange, restore)  # no rank publishes before all have cleared their flags
    if failure is not None:
        raise failure

    def peers() -> list[Peers]:
        silent = torch.zeros(count, dtype=torch.int32, device=device)
        return [
            Peers(rank, torch.tensor(at, dtype=torch.int64, device=device), flags[i], tables.mark(), silent)
            for i, at in enumerate(places)
        ]

    return _on_each(exchange, peers)


def share(
    vllm_config: VllmConfig,
    settings: ConnectorSettings,
    policy: Policy,
    caches: dict[str, LayerCache],
    tables: HostTables,
) -> tuple[dict[str, LayerCache], Callable[[], None]]:
    """The caches with their peers, as the settings want it and the ranks can; and what to call at the end.

    Raises ValueError where kvsieve.sharded_fetch=true can't be had.
    """
    from vllm.distributed.parallel_state import get_tp_group

    size = vllm_config.parallel_config.tensor_parallel_size
    if not settings.sharded_fetch or size == 1:
        return caches, lambda: None
    group = get_tp_group()
    memory: Memory | None = None
    try:
        if reason := unsound(vllm_config, policy):
            raise Unshared(reason)
        exchange = _exchange_of(group)
        device = next(iter(caches.values())).cache.device
        memory = _cuda_memory(exchange, device)
        if settings.sharded_fetch == "auto":
            _require_links(exchange, device)
        peers = connect(group.rank_in_group, size, exchange, memory, list(caches.values()), tables)
    except Unshared as error:
        if memory is not None:
            memory.close()
        if settings.sharded_fetch is True:
            raise ValueError(f"kvsieve: {PREFIX}sharded_fetch=true can't be had: {error}") from None
        if group.rank_in_group == 0:
            logger.info("kvsieve: every rank fetches all of its rows from the arena: %s", error)
        return caches, lambda: None
    if group.rank_in_group == 0:
        logger.info(
            "kvsieve: sharded fetch: each of %d ranks fetches its share of rows from the arena, and reads "
            "the others' from their GPUs",
            size,
        )
    return {
        name: replace(cache, peers=p) for (name, cache), p in zip(caches.items(), peers, strict=True)
    }, memory.close


def unsound(vllm_config: VllmConfig, policy: Policy) -> str:
    """Why ranks may not read one another's hot buffers in this configuration; "" if they may.

    A rank reads them until its swap-in of the layer ends. What could overwrite them comes after the
    all-reduce that follows the layer's attention, with these exceptions.
    """
    if any(prefetch.source == "previous-step" for step in policy.steps for prefetch in step):
        return f"{PREFIX}prefetch={policy.name!r} fetches for a layer while other ranks may still read it"
    speculative = vllm_config.speculative_config
    size = vllm_config.parallel_config.tensor_parallel_size
    if speculative is not None and speculative.draft_tensor_parallel_size not in (None, size):
        return f"the drafter does not run on the model's {size} ranks (draft_tensor_parallel_size)"
    return ""


def _together(exchange: Exchange, work: Callable[[], T]) -> list[T]:
    """What each rank's work returns. Raises Unshared on all ranks when it fails on one."""
    mine: tuple[T | None, str]
    try:
        mine = work(), ""
    except Exception as error:  # whatever it is: the others have to know
        mine = None, f"{type(error).__name__}: {error}"
    results = exchange(mine)
    for rank, (_, why) in enumerate(results):
        if why:
            raise Unshared(f"rank {rank}: {why}")
    return [result for result, _ in results]


def _on_each(exchange: Exchange, work: Callable[[], T]) -> T:
    """What this rank's work returns; the others only hear that it is done. Raises as _together()."""
    done: list[T] = []
    _together(exchange, lambda: done.append(work()))
    return done[0]


def _cuda_memory(exchange: Exchange, device: torch.device) -> Memory:
    def make() -> Memory:
        if device.type != "cuda":
            raise RuntimeError(f"the caches are on {device}, not on CUDA devices")
        return CudaMemory()

    return _on_each(exchange, make)


def _require_links(exchange: Exchange, device: torch.device) -> None:
    from vllm.platforms import current_platform

    def physical() -> int:
        index = device.index if device.index is not None else torch.cuda.current_device()
        return int(current_platform.visible_device_id_to_physical_device_id(index))

    ids = _together(exchange, physical)
    if not all(_together(exchange, lambda: bool(current_platform.is_fully_connected(ids)))):
        raise Unshared("NVLink does not join all of its GPUs")


def _exchange_of(group: Any) -> Exchange:
    def exchange(value: Any) -> list[Any]:
        values: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(values, value, group=group.cpu_group)
        return values

    return exchange


def _probe(place: tuple[bytes, int], writer: int = 0) -> bytes:
    """Bytes for a place that no other place has. Layers of different KV groups may be at the same one."""
    handle, offset = place
    return hashlib.blake2b(b"%d %d " % (offset, writer) + handle, digest_size=_PROBE_BYTES).digest()


def _boot_id() -> str:
    """Containers of one host share it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
