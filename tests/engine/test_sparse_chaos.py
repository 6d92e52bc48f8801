"""Engines in sparse mode under everything at once: pools and stores that are too small, late and failed
copies, failed loads, aborts, lost sessions, two engines on one store. Every block that a step reads holds
what it should (sparse_scene.py), nobody waits for ever, and in the end everything is given back.
"""

from __future__ import annotations

import random

import pytest

from tests.engine.sparse_scene import Scene
from tests.engine.sparse_store import FakeClient, FakeStore
from tests.engine.sparse_vllm import new_request, tokens_of

SEEDS = 24


DENSE = pytest.mark.parametrize("dense", ["", "cpu", "cuda"], ids=["dsa", "dense", "dense-gpu"])


def scene_of(rng: random.Random, store: FakeStore, seed: int, drafts: int = 0, dense: str = "") -> Scene:
    client = FakeClient(store, rng.choice([4, 16]))
    return Scene(
        client,
        {1: store.arena},
        pool_mib=rng.choice([10, 14, 24]),
        hot_blocks=rng.randint(1, 4),
        window_blocks=rng.randint(1, 2),
        chunk=rng.choice([64, 100, 256]),
        overlap=rng.choice([1, 2]),
        late=rng.choice([0, 3]),
        drafts=drafts,
        dense=dense,
        seqs=rng.choice([3, 8]),
        max_model_len=1600,
        seed=seed,
    )


def work(scene: Scene, rng: random.Random) -> None:
    """Perhaps one more request: of a family that shares a prefix, or the next turn of one that is done."""
    if rng.random() < 0.2:
        number = len(scene.requests)
        shared, own = rng.randrange(64, 900), rng.randrange(1, 400)
        tokens = tokens_of(rng.randrange(3), shared) + tokens_of(100 + number, own)
        if scene.done and rng.random() < 0.4:
            last = scene.requests[rng.choice(scene.done)].all_token_ids
            tokens = [*last, *tokens_of(100 + number, own % 60 + 1)][:1300]
        scene.submit(new_request(f"r{number}", tokens, rng.choice([1, 5, 60, 200])))
        if rng.random() < 0.1:
            scene.fail_loads.add(f"r{number}")
    if rng.random() < 0.03 and scene.requests:
        scene.abort(rng.choice(sorted(scene.requests)))
    scene.step()
    if scene.orders[-1].hint_saves and scene.client.attachment is not None:
        blocks = sum(host.owed - host.hints for host in scene.half._hosts.values())
        assert scene.client.credits >= blocks, "a hint took a slot that a request may need"


def check_all_given_back(*scenes: Scene) -> None:
    for scene in scenes:
        scene.client.tick()
    for scene in scenes:
        scene.check_empty()
        store = scene.client.store
        mine = [slot for slot, client in store.granted.items() if client is scene.client]
        assert len(mine) == scene.client.credits
        assert not store.leases


@DENSE
@pytest.mark.parametrize("seed", range(SEEDS))
def test_one_engine(seed: int, dense: str) -> None:
    rng = random.Random(seed)
    store = FakeStore(rng.choice([40, 60, 120, 1000]), rng)
    scene = scene_of(rng, store, seed, dense=dense)
    scene.bad_copies = rng.choice([0.0, 0.05])
    for _ in range(rng.randint(1, 120)):
        work(scene, rng)
    scene.run(4000)
    check_all_given_back(scene)


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("drafts", [1, 3])
def test_rows_of_rejected_drafts_are_neither_saved_nor_released(drafts: int, seed: int) -> None:
    """They stay on the GPU, where the next step overwrites them before they are read."""
    rng = random.Random(seed)
    store = FakeStore(rng.choice([60, 120, 300]), rng)
    scene = scene_of(rng, store, seed, drafts)
    scene.bad_copies = rng.choice([0.0, 0.05])
    for _ in range(rng.randint(20, 120)):
        work(scene, rng)
    scene.run(4000)
    check_all_given_back(scene)


@DENSE
@pytest.mark.parametrize("seed", range(SEEDS))
def test_sessions_are_lost(seed: int, dense: str) -> None:
    rng = random.Random(seed)
    scene = scene_of(rng, FakeStore(200, rng), seed, dense=dense)
    for _ in range(rng.randint(60, 200)):
        work(scene, rng)
        client = scene.client
        if client.attachment is None and rng.random() < 0.2:
            client.attach(FakeStore(200, rng))
            scene.arenas[client.epoch] = client.store.arena
        elif client.attachment is not None and rng.random() < 0.05:
            client.lose()
    if scene.client.attachment is None:
        scene.client.attach(FakeStore(200, rng))
        scene.arenas[scene.client.epoch] = scene.client.store.arena
    scene.run(4000)
    check_all_given_back(scene)
    assert set(scene.arenas) <= {scene.client.epoch}


@DENSE
@pytest.mark.parametrize("seed", range(SEEDS))
def test_two_engines_on_one_store(seed: int, dense: str) -> None:
    rng = random.Random(seed)
    store = FakeStore(rng.choice([30, 40, 80]), rng)
    scenes = [scene_of(rng, store, seed + i, dense=dense) for i in range(2)]
    for _ in range(rng.randint(20, 120)):
        for scene in scenes:
            work(scene, rng)
    for _ in range(8000):
        if not any(scene.is_busy for scene in scenes):
            break
        for scene in scenes:
            scene.step()
    check_all_given_back(*scenes)
