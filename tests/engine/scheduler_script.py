"""A scheduler half step by step, with a scripted client: what an engine can't be made to do at will."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.request import RequestStatus

from kvsieve_connector.metadata import StepOrders
from kvsieve_connector.scheduler import SchedulerHalf
from kvsieve_connector.settings import ConnectorSettings
from kvsieve_store.client import Attachment, Fetch, Match, Pulled, SealEntry, SealResult, SlotRef

BLOCK = 4


def attachment(epoch: int, instance: bytes = b"one") -> Attachment:
    return Attachment(
        epoch=epoch,
        instance=instance,
        pool_id=bytes(32),
        extent_bytes=1 << 20,
        segments=(),
        slot_bytes=4096,
        slots_per_extent=8,
        slots_offset=4096,
        lock_path="",
        store_version="0",
        peer_address="10.0.0.7:9400",
    )


@dataclass
class Pull:
    """A pull that was sent. terms: parent, seconds, wait_seconds."""

    source: str
    keys: list[bytes]
    terms: dict[str, Any]
    future: Future[Pulled] = field(default_factory=Future)

    def answer(self, present: int) -> None:
        reason = "" if present == len(self.keys) else "the other store has no more of them"
        self.future.set_result(Pulled(present, present, 0, reason))


@dataclass
class ScriptedClient:
    """Records what is asked; the test answers."""

    attachment: Attachment | None = field(default_factory=lambda: attachment(1))
    slots: list[SlotRef] = field(default_factory=lambda: [SlotRef(i, 1) for i in range(100)])
    matches: list[Future[Match]] = field(default_factory=list)
    fetches: list[Fetch | None] = field(default_factory=list)
    seals: list[tuple[list[SealEntry], Future[list[SealResult]]]] = field(default_factory=list)
    leases_back: list[tuple[int, int | None]] = field(default_factory=list)
    slots_back: list[SlotRef] = field(default_factory=list)
    pulls: list[Pull] = field(default_factory=list)
    holds: list[list[bytes]] = field(default_factory=list)
    announced: list[list[SealEntry]] = field(default_factory=list)

    def pull_async(self, source: str, keys: Sequence[bytes], **terms: Any) -> Future[Pulled]:
        self.pulls.append(Pull(source, list(keys), terms))
        return self.pulls[-1].future

    def hold_async(self, keys: Sequence[bytes], *, seconds: float) -> Future[int]:
        self.holds.append(list(keys))
        return Future()

    def announce_async(
        self, entries: Sequence[SealEntry], *, epoch: int | None = None, hold_seconds: float = 0.0
    ) -> Future[None]:
        assert hold_seconds == 60.0  # kvsieve.handoff_lease_ms
        self.announced.append(list(entries))
        return Future()

    @property
    def credits(self) -> int:
        return len(self.slots)

    def take_credits(self, n: int, *, epoch: int | None = None) -> list[SlotRef]:
        if self.attachment is None or epoch != self.attachment.epoch:
            return []
        taken, self.slots = self.slots[:n], self.slots[n:]
        return taken

    def match_async(self, keys: Sequence[bytes], *, fetch: Fetch | None = None) -> Future[Match]:
        self.fetches.append(fetch)
        self.matches.append(Future())
        self.matches[-1].set_running_or_notify_cancel()
        return self.matches[-1]

    def seal_async(self, entries: Sequence[SealEntry], *, epoch: int | None = None) -> Any:
        self.seals.append((list(entries), Future()))
        return self.seals[-1][1]

    def release_async(
        self, lease_ids: Sequence[int] = (), refs: Sequence[SlotRef] = (), *, epoch: int | None = None
    ) -> None:
        self.leases_back += [(lease, epoch) for lease in lease_ids]
        self.slots_back += refs


class Scene:
    """A scheduler half, its client, and requests of `blocks` full blocks and one token more."""

    def __init__(self, ranks: int = 1, groups: int = 1, **settings: Any) -> None:
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
            scheduler_config=SimpleNamespace(max_num_seqs=8),
            kv_events_config=None,
            cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"),
        )
        group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=BLOCK))
        init_none_hash(sha256)
        caches = SimpleNamespace(kv_cache_groups=[group] * groups, hash_block_size=BLOCK)
        self.half = SchedulerHalf(config, caches, ConnectorSettings(endpoint="unix:///s", **settings))  # type: ignore[arg-type]
        self.client = ScriptedClient()
        self.half.use(self.client)  # type: ignore[arg-type]
        self.tables: dict[str, tuple[list[int], ...]] = {}
        self.groups = groups

    def request(self, name: str, blocks: int, tail: int = 1, **params: Any) -> Any:
        """tail: tokens beyond the full blocks. params: kv_transfer_params."""
        self.tables[name] = tuple(list(range(1, blocks + 2)) for _ in range(self.groups))
        return SimpleNamespace(
            request_id=name,
            block_hashes=[f"{name}{i}".encode().ljust(32, b".") for i in range(blocks)],
            num_tokens=blocks * BLOCK + tail,
            num_prompt_tokens=blocks * BLOCK + tail,
            num_computed_tokens=0,
            num_preemptions=0,
            skip_reading_prefix_cache=False,
            lora_request=None,
            cache_salt=None,
            mm_features=[],
            prompt_embeds=None,
            status=RequestStatus.FINISHED_LENGTH_CAPPED,
            kv_transfer_params=params or None,
            all_token_ids=list(range(blocks * BLOCK + tail)),
        )

    def step(self, **tokens: int) -> StepOrders:
        state = SimpleNamespace(resolve_block_ids=self.tables.__getitem__)
        output = SimpleNamespace(num_scheduled_tokens=tokens, kv_connector_block_state=state)
        return self.half.build_orders(output)  # type: ignore[arg-type]

    def blocks(self, name: str) -> Any:
        return SimpleNamespace(get_block_ids=lambda: self.tables[name])


def answer(blocks: int, lease: int = 7, epoch: int = 1) -> Match:
    return Match(tuple(SlotRef(50 + i, 3) for i in range(blocks)), (lease,), epoch)
