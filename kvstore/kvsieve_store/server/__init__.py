"""The store process: gRPC and HTTP around the state machine. Converts messages, maps errors, keeps time."""

from kvsieve_store.server.process import run
from kvsieve_store.server.store import Store

__all__ = ["Store", "run"]
