"""The engine's session with the store: made from the workers' handshakes, kept through losses."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

from kvsieve_connector.geometry import pool_spec
from kvsieve_connector.metadata import Handshake
from kvsieve_connector.scheduler import SchedulerHalf
from kvsieve_connector.settings import ConnectorSettings
from kvsieve_store.client import ClientState, StoreClient
from kvsieve_store.errors import UnavailableError
from kvsieve_store.protocol.limits import MAX_CREDITS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger("vllm.kvsieve")


class Session:
    """Owns the client. Without a store the engine serves as if there were none, and this says so once."""

    def __init__(
        self, vllm_config: VllmConfig, settings: ConnectorSettings, scheduler: SchedulerHalf
    ) -> None:
        self._config, self._settings, self._scheduler = vllm_config, settings, scheduler
        self._client: StoreClient | None = None
        self._lock = threading.Lock()
        self._started = False
        self._attached = False
        self._told = False

    def start(self, handshakes: dict[int, Handshake]) -> None:
        """handshakes: per TP rank. Waits for the store for `connect_timeout_ms` at most.

        Raises ValueError when the ranks differ or the store is too small for sparse mode, and what the store
        answers when it refuses this engine.
        """
        first = handshakes[min(handshakes)].geometry
        for rank, handshake in handshakes.items():
            if handshake.geometry != first:
                raise ValueError(f"kvsieve: rank {rank} has another cache geometry than rank 0")
        cache = self._config.cache_config
        hash_fn = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
        spec = pool_spec(
            self._config,
            first,
            resolve_none_hash_seed(hash_fn),
            name=self._settings.pool,
            model_id=self._settings.model_id,
            attention=self._scheduler.attention,
        )
        transfer = self._config.kv_transfer_config
        assert transfer is not None
        credits = self._credits(first.block_tokens)
        self._client = StoreClient(
            self._settings.endpoint,
            spec,
            engine_id=transfer.engine_id or "vllm",
            credit_target=credits,
            on_change=self._changed,
        )
        self._scheduler.use(self._client, credits)
        self._client.start()
        try:
            attachment = self._client.wait_attached(self._settings.connect_timeout_ms / 1000)
            self._scheduler.check_attachment(attachment)
        except UnavailableError as error:
            self._tell(f"kvsieve: serving without a store, and trying on: {error}")
        self._started = True

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _credits(self, block_tokens: int) -> int:
        if self._settings.credits is not None:
            return self._settings.credits
        per_step = -(-self._config.scheduler_config.max_num_batched_tokens // block_tokens)
        return min(4 * per_step + self._config.scheduler_config.max_num_seqs, MAX_CREDITS)

    def _changed(self, state: str) -> None:
        """Called by the client's thread at each change of state."""
        client = self._client
        if client is None or state == ClientState.CLOSED:
            return
        if state == ClientState.ATTACHED and client.attachment is not None:
            attachment = client.attachment
            self._attached, self._told = True, False
            logger.info(
                "kvsieve: attached to the store at %s (version %s, pool %s, %.1f MiB a block)",
                self._settings.endpoint,
                attachment.store_version,
                attachment.pool_id.hex()[:12],
                attachment.slot_bytes / 2**20,
            )
        elif state == ClientState.REFUSED and self._started:  # before that, the start fails with the reason
            self._tell(f"kvsieve: the store refuses this engine, serving without: {client.error}")
        elif state == ClientState.DRAINING:
            self._tell("kvsieve: the store is draining; nothing is matched or saved until there is another")
        elif state == ClientState.CONNECTING and self._attached:
            self._attached = False
            self._tell(
                f"kvsieve: lost the store at {self._settings.endpoint}; serving without, and trying on"
            )

    def _tell(self, message: str) -> None:
        """One line per loss, however long it lasts."""
        with self._lock:
            if self._told:
                return
            self._told = True
        logger.warning("%s", message)
