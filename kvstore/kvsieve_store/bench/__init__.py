"""Benchmarks of the store, its client and its shared memory: what `kvsieve bench` and bench/ run."""

from kvsieve_store.bench.summary import run

__all__ = ["run"]
