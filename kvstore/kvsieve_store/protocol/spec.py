"""PoolSpec: what makes two engines' blocks interchangeable, and the pool id made from it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, fields

from kvsieve.v1 import store_pb2 as pb
from kvsieve_store.errors import InvalidRequestError
from kvsieve_store.protocol.limits import MAX_HEADS, MAX_LAYERS, MAX_PLANES, MIN_RUN_BYTES


@dataclass(frozen=True, slots=True)
class Plane:
    """One kind of cache in a block.

    name: "main" (K and V, or the MLA latent) or "indexer".
    layer_bytes: bytes of one block in each layer, as one shard holds it.
    shards: the TP size where the plane is sharded over TP ranks, 1 where it is replicated.
    heads: KV heads of the whole model, of which each shard has an equal part, in order; with more shards than
    heads, shards / heads neighbours have the same head. 0: the plane is not known to lie by heads.
    head_runs: how often a shard's heads follow one another in its part of a layer, each time in runs of equal
    size; 0 without heads. Once where a head has all tokens in a row.

    heads and head_runs follow from the rest, so they are neither in the pool id nor compared.
    """

    name: str
    layer_bytes: tuple[int, ...]
    shards: int = 1
    heads: int = field(default=0, compare=False)
    head_runs: int = field(default=0, compare=False)

    @property
    def shard_heads(self) -> int:
        """Heads of each shard."""
        return max(1, self.heads // self.shards)

    @property
    def run_bytes(self) -> tuple[int, ...]:
        """Per layer: bytes of one head that lie in a row. Only with heads."""
        parts = self.shard_heads * self.head_runs
        return tuple(size // parts for size in self.layer_bytes)

    @property
    def is_splittable(self) -> bool:
        """Whether its blocks can be cut for another TP size: by heads, into runs that are worth a read."""
        return self.heads > 0 and min(self.run_bytes) >= MIN_RUN_BYTES


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """A pool's fingerprint; see proto/kvsieve/v1/store.proto for units and limits."""

    name: str
    model: str
    dtype: str
    block_tokens: int
    hash_algo: str
    hash_seed: str
    layout: str
    tp_size: int
    planes: tuple[Plane, ...]

    def __post_init__(self) -> None:
        _check_text("pool.name", self.name, 1, 256)
        _check_text("pool.model", self.model, 1, 1024)
        _check_text("pool.dtype", self.dtype, 1, 64)
        _check_text("pool.hash_algo", self.hash_algo, 1, 64)
        _check_text("pool.hash_seed", self.hash_seed, 0, 256)
        _check_text("pool.layout", self.layout, 1, 256)
        _check_range("pool.block_tokens", self.block_tokens, 1, 65_536)
        _check_range("pool.tp_size", self.tp_size, 1, 32)
        _check_range("pool.planes (count)", len(self.planes), 1, MAX_PLANES)
        for i, plane in enumerate(self.planes):
            at = f"pool.planes[{i}]"
            _check_text(f"{at}.name", plane.name, 1, 64)
            _check_range(f"{at}.shards", plane.shards, 1, 32)
            _check_range(f"{at}.layer_bytes (count)", len(plane.layer_bytes), 1, MAX_LAYERS)
            for layer, size in enumerate(plane.layer_bytes):
                _check_range(f"{at}.layer_bytes[{layer}]", size, 1, 1 << 30)
            _check_heads(at, plane)
        names = [plane.name for plane in self.planes]
        if len(set(names)) != len(names):
            raise InvalidRequestError(f"pool.planes: names must differ, got {names}")

    def canonical(self) -> bytes:
        """The bytes whose SHA-256 is the pool id: JSON, keys sorted, no spaces, ASCII (docs/protocol.md)."""
        value = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "planes"}
        value["planes"] = [
            {"layer_bytes": list(p.layer_bytes), "name": p.name, "shards": p.shards} for p in self.planes
        ]
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()

    def pool_id(self) -> bytes:
        """SHA-256 of the canonical form, 32 bytes."""
        return hashlib.sha256(self.canonical()).digest()

    def family_id(self) -> bytes:
        """32 bytes, the same for pools of which each can have the other's blocks: all but the TP size is
        equal, and what is sharded can be split by heads. The pool id where nothing can."""
        if not any(plane.is_splittable for plane in self.planes):
            return self.pool_id()
        value = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("planes", "tp_size")}
        value["planes"] = [
            {"heads": p.heads, "head_runs": p.head_runs, "name": p.name, "run_bytes": list(p.run_bytes)}
            if p.is_splittable
            else {"layer_bytes": list(p.layer_bytes), "name": p.name, "shards": p.shards}
            for p in self.planes
        ]
        return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).digest()

    def why_not_family(self, other: PoolSpec) -> str:
        """Why this engine can't have blocks of the other pool; empty if it can."""
        if self == other or self.family_id() == other.family_id():
            return ""
        differing = [text for text in self.differences(other) if not text.startswith("tp_size:")]
        if differing or [p.name for p in self.planes] != [p.name for p in other.planes]:
            return "; ".join(differing or self._planes_differ(other))
        for mine, theirs in zip(self.planes, other.planes, strict=True):
            if mine.shards != theirs.shards and not (mine.is_splittable and theirs.is_splittable):
                return (
                    f"tp_size: {self.tp_size} (this engine) != {other.tp_size} (the pool), and plane "
                    f"{mine.name!r} can't be split by heads: in its layout, {self.layout!r}, no head has "
                    f"{MIN_RUN_BYTES} bytes or more in a row, or it is not known"
                )
        return "; ".join(self._planes_differ(other))

    def differences(self, other: PoolSpec) -> list[str]:
        """One text per field that differs: "field: mine (this engine) != other (the pool)".

        Planes, whose sizes follow from other fields, are told only where nothing else differs.
        """
        if self == other:
            return []
        return [
            f"{f.name}: {mine!r} (this engine) != {theirs!r} (the pool)"
            for f in fields(self)
            if f.name != "planes" and (mine := getattr(self, f.name)) != (theirs := getattr(other, f.name))
        ] or self._planes_differ(other)

    def _planes_differ(self, other: PoolSpec) -> list[str]:
        return [f"planes: {_sizes(self.planes)} (this engine) != {_sizes(other.planes)} (the pool)"]

    def to_proto(self) -> pb.PoolSpec:
        planes = [
            pb.Plane(
                name=p.name,
                layer_bytes=p.layer_bytes,
                shards=p.shards,
                heads=p.heads,
                head_runs=p.head_runs,
            )
            for p in self.planes
        ]
        return pb.PoolSpec(
            **{f.name: getattr(self, f.name) for f in fields(self) if f.name != "planes"}, planes=planes
        )

    @staticmethod
    def from_proto(message: pb.PoolSpec) -> PoolSpec:
        """Raises InvalidRequestError, which names the field and its limit.

        Counts are checked first: what a message may hold too many of is not built.
        """
        _check_range("pool.planes (count)", len(message.planes), 1, MAX_PLANES)
        for i, plane in enumerate(message.planes):
            _check_range(f"pool.planes[{i}].layer_bytes (count)", len(plane.layer_bytes), 1, MAX_LAYERS)
        return PoolSpec(
            name=message.name,
            model=message.model,
            dtype=message.dtype,
            block_tokens=message.block_tokens,
            hash_algo=message.hash_algo,
            hash_seed=message.hash_seed,
            layout=message.layout,
            tp_size=message.tp_size,
            planes=tuple(
                Plane(p.name, tuple(p.layer_bytes), p.shards, p.heads, p.head_runs) for p in message.planes
            ),
        )


def _sizes(planes: tuple[Plane, ...]) -> str:
    """Planes in short."""
    return ", ".join(
        f"{p.name!r} with {len(p.layer_bytes)} layers, {sum(p.layer_bytes)} bytes, {p.shards} shards"
        for p in planes
    )


def _check_heads(at: str, plane: Plane) -> None:
    _check_range(f"{at}.heads", plane.heads, 0, MAX_HEADS)
    if not plane.heads:
        _check_range(f"{at}.head_runs", plane.head_runs, 0, 0)
        return
    if plane.heads % plane.shards and plane.shards % plane.heads:
        raise InvalidRequestError(
            f"{at}.heads: {plane.heads} given, which {plane.shards} shards can't share equally"
        )
    _check_range(f"{at}.head_runs", plane.head_runs, 1, 1 << 20)
    parts = plane.head_runs * plane.shard_heads
    for layer, size in enumerate(plane.layer_bytes):
        if size % parts:
            raise InvalidRequestError(
                f"{at}.layer_bytes[{layer}]: {size} given, not a multiple of {plane.head_runs} head_runs of "
                f"{plane.shard_heads} heads"
            )


def _check_text(field: str, value: str, low: int, high: int) -> None:
    if not low <= len(value) <= high:
        raise InvalidRequestError(f"{field}: {len(value)} characters given, {low} to {high} allowed")


def _check_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequestError(f"{field}: {value} given, {low} to {high} allowed")
