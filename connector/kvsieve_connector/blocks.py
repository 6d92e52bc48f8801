"""A request's blocks as the store has them: their keys, and the pages that make them up."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    hash_block_tokens,
    maybe_convert_block_hash,
)

from kvsieve_connector.geometry import group_block_tokens, store_block_tokens
from kvsieve_connector.metadata import BlockPages

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

HashFunction = Callable[[Any], bytes]

MEDIUM = "CPU"
"""Medium of our KV events: the host's memory."""


class Blocks:
    """tokens: of one block. group_tokens: of one page, in each KV group. hashes: vLLM's, of one block.

    A request's **tail** is what its prompt has beyond its full blocks.
    """

    def __init__(self, kv_cache_config: KVCacheConfig, hash_fn: HashFunction) -> None:
        """hash_fn: that of vLLM's hash chain. Raises ValueError when its blocks do not make up ours."""
        self.tokens = store_block_tokens(kv_cache_config)
        self.group_tokens = group_block_tokens(kv_cache_config)
        hash_tokens = kv_cache_config.hash_block_size or self.tokens
        if self.tokens % hash_tokens:
            raise ValueError(
                f"kvsieve: hash block size {hash_tokens} does not divide the block size {self.tokens}"
            )
        self.hashes = self.tokens // hash_tokens
        self._hash_fn = hash_fn

    # Keys

    def known(self, request: Request) -> int:
        """Blocks of the request that have a key."""
        return len(request.block_hashes) // self.hashes

    def key(self, request: Request, index: int) -> bytes:
        """Key of a block: its last hash, which chains over all before it."""
        return bytes(request.block_hashes[(index + 1) * self.hashes - 1])

    def parent(self, request: Request, index: int) -> bytes:
        """Key of the block before; empty for the first."""
        return self.key(request, index - 1) if index else b""

    def first(self, request: Request, count: int) -> list[bytes]:
        """Keys of the first `count` blocks, or as many as have one."""
        return [self.key(request, i) for i in range(min(self.known(request), count))]

    def full(self, request: Request) -> int:
        """Full blocks of the prompt."""
        return request.num_prompt_tokens // self.tokens

    def tail_key(self, request: Request) -> bytes:
        """Key of the tail: 32 bytes, never a block's own. Empty when the tail is at most the last token,
        which is always computed.

        It covers what vLLM's hash of a block covers: all before it, the tokens and so their number, and salt,
        LoRA and multimodal ids.
        """
        full = self.full(request)
        start, end = full * self.tokens, request.num_prompt_tokens
        if end - start < 2 or full > self.known(request):
            return b""
        parent = self.parent(request, full)
        extra, _ = generate_block_hash_extra_keys(request, start, end, 0)
        tokens = request.all_token_ids[start:end]
        inner = hash_block_tokens(self._hash_fn, BlockHash(parent) if parent else None, tokens, extra)
        return hashlib.sha256(b"kvsieve tail v1\0" + bytes(inner)).digest()

    def stored_event(self, request: Request, index: int) -> BlockStored:
        """What vLLM's KV events say of a block that the store has."""
        parent, first, lora = self.parent(request, index), index * self.tokens, request.lora_request
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(BlockHash(self.key(request, index)))],
            parent_block_hash=maybe_convert_block_hash(BlockHash(parent)) if parent else None,
            token_ids=list(request.all_token_ids[first : first + self.tokens]),
            block_size=self.tokens,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM,
            lora_name=lora.name if lora else None,
        )

    # Pages

    def pages(self, block_ids: tuple[list[int], ...], indices: Iterable[int]) -> list[BlockPages]:
        """Pages of blocks, 0 where there is none. block_ids: of the request, per KV group."""
        indices, columns = list(indices), []
        for ids, tokens in zip(block_ids, self.group_tokens, strict=True):
            n = self.tokens // tokens
            missing = ((max(indices, default=-1) + 1) * n) - len(ids)
            ids = [*ids, *(0,) * missing] if missing > 0 else ids
            columns.append([tuple(ids[index * n : (index + 1) * n]) for index in indices])
        return list(zip(*columns, strict=True))

    def is_whole(self, block: BlockPages) -> bool:
        """Whether every group has all its pages of the block."""
        return 0 not in chain.from_iterable(block)
