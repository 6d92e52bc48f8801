"""Offers of pools that differ in their TP size: which one a store offers, and how its blocks are cut."""

from __future__ import annotations

from kvsieve.v1 import peer_pb2 as pb
from kvsieve_store.errors import InvalidRequestError, NotFoundError
from kvsieve_store.protocol.layout import SlotLayout
from kvsieve_store.protocol.slot_map import SlotMap
from kvsieve_store.protocol.spec import PoolSpec
from kvsieve_store.state import StoreState


def offered_pool(state: StoreState, request: pb.OfferRequest) -> tuple[PoolSpec, SlotMap]:
    """The pool of this store that is offered, the one that is asked for or one of its name and family, and
    how its slots lie in those of the store that asks.

    Raises NotFoundError, with what differs, and InvalidRequestError (pool).
    """
    try:
        here = state.spec_of(request.pool_id)
    except NotFoundError:
        if not request.HasField("pool"):
            raise
    else:
        return here, SlotMap.whole(SlotLayout.of(here).slot_bytes)
    asked = PoolSpec.from_proto(request.pool)
    if asked.pool_id() != request.pool_id:
        raise InvalidRequestError("pool: given, but its id is another than pool_id")
    named = state.spec_named(asked.name)
    if named is None:
        raise NotFoundError(f"pool_id: there is no pool {request.pool_id.hex()!r}, and none of its name")
    if why := asked.why_not_family(named):
        raise NotFoundError(f"pool_id: the pool {named.name!r} is another here: {why}")
    return named, SlotMap.between(named, asked)


def map_of_offer(offer: pb.OfferResponse, spec: PoolSpec) -> SlotMap:
    """How the blocks of an offer lie in slots of the pool of `spec`, which was asked for. Raises
    InvalidRequestError for a pool whose blocks are no blocks of this one."""
    if not offer.HasField("pool"):
        return SlotMap.whole(SlotLayout.of(spec).slot_bytes)
    return SlotMap.between(PoolSpec.from_proto(offer.pool), spec)
