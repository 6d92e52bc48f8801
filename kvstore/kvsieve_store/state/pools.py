"""PoolTable: the pools of a store, and the ways to name one."""

from __future__ import annotations

from kvsieve_store.errors import NotFoundError
from kvsieve_store.state.pool import Pool

_MIN_POOL_ID_DIGITS = 8


class PoolTable(dict[str, Pool]):
    """By name."""

    def with_id(self, pool_id: bytes) -> Pool | None:
        """The pool with this id, if there is one."""
        return next((pool for pool in self.values() if pool.pool_id == pool_id), None)

    def find(self, pool_ref: str) -> Pool:
        """By name, or by at least 8 hex digits of the id. Raises NotFoundError."""
        pool = self.get(pool_ref)
        if pool is not None:
            return pool
        prefix = pool_ref.lower()
        long_enough = len(prefix) >= _MIN_POOL_ID_DIGITS
        found = [pool for pool in self.values() if long_enough and pool.pool_id.hex().startswith(prefix)]
        if len(found) == 1:
            return found[0]
        if found:
            raise NotFoundError(f"pool: {pool_ref!r} fits {len(found)} pools; give more digits of the id")
        raise NotFoundError(
            f"pool: no pool has the name {pool_ref!r}, or an id that starts with it "
            f"(at least {_MIN_POOL_ID_DIGITS} hex digits)"
        )
