"""PoolSpec: what makes two engines' blocks interchangeable, and the pool id made from it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields

from kvsieve.v1 import store_pb2 as pb
from kvsieve_store.errors import InvalidRequestError
from kvsieve_store.protocol.limits import MAX_LAYERS, MAX_PLANES


@dataclass(frozen=True, slots=True)
class Plane:
    """One kind of cache in a block.

    name: "main" (K and V, or the MLA latent) or "indexer".
    layer_bytes: bytes of one block in each layer, as one shard holds it.
    shards: the TP size where the plane is sharded over TP ranks, 1 where it is replicated.
    """

    name: str
    layer_bytes: tuple[int, ...]
    shards: int = 1


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
        ] or [f"planes: {_sizes(self.planes)} (this engine) != {_sizes(other.planes)} (the pool)"]

    def to_proto(self) -> pb.PoolSpec:
        planes = [pb.Plane(name=p.name, layer_bytes=p.layer_bytes, shards=p.shards) for p in self.planes]
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
            planes=tuple(Plane(p.name, tuple(p.layer_bytes), p.shards) for p in message.planes),
        )


def _sizes(planes: tuple[Plane, ...]) -> str:
    """Planes in short."""
    return ", ".join(
        f"{p.name} with {len(p.layer_bytes)} layers, {sum(p.layer_bytes)} bytes, {p.shards} shards"
        for p in planes
    )


def _check_text(field: str, value: str, low: int, high: int) -> None:
    if not low <= len(value) <= high:
        raise InvalidRequestError(f"{field}: {len(value)} characters given, {low} to {high} allowed")


def _check_range(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidRequestError(f"{field}: {value} given, {low} to {high} allowed")
