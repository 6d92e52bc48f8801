"""Stores, engines and a real directory, which dies, stands still, forgets and lies."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvsieve.v1 import peer_pb2 as pb
from kvsieve_store.client import AdminClient, Fetch, Match
from kvsieve_store.directory.table import block_name, store_name
from kvsieve_store.errors import InvalidRequestError
from tests.directory.conftest import StartHost
from tests.directory.redis_server import RedisCluster, RedisServer, why_missing
from tests.peers.conftest import SPEC, Host
from tests.protocol.client_stores import chain, until

COUNT = 100
ANY = Fetch(20.0)
LOST = "can't be used"
BACK = "is back;"


def connect(redis: RedisServer) -> Any:
    from redis import Redis

    return Redis(port=redis.port)


def fetch(host: Host, keys: Sequence[bytes], how: Fetch = ANY) -> Match:
    """A match that may fetch; bytes are compared, and the lease is given back."""
    match = host.client.match(keys, fetch=how)
    host.client.release(match.lease_ids)
    assert host.holds(keys) >= len(match.refs)
    return match


def announced(redis: RedisServer | RedisCluster, blocks: int, stores: int) -> None:
    """Waits until the directory has so many blocks and stores."""
    until(lambda: redis.size() == blocks + stores, 30)


def log(host: Host, text: str) -> int:
    """Lines of the store's log with the text."""
    return sum(text in line for line in host.store.log.read_text().splitlines())


def counter(host: Host, name: str) -> float:
    return host.metric(f"kvsieve_directory_{name}")


def test_a_prefix_of_one_host_is_found_from_another(redis: RedisServer, start_host: StartHost) -> None:
    source, target = start_host(redis.url), start_host(redis.url)
    keys = source.save(COUNT)
    announced(redis, COUNT, 2)
    assert len(target.client.match(keys).refs) == 0
    few = fetch(target, keys, Fetch(20.0, min_blocks=COUNT + 1))
    assert (len(few.refs), few.fetched) == (0, 0)
    match = fetch(target, keys + chain(5, start=5000))
    assert (len(match.refs), match.fetched) == (COUNT, COUNT)
    assert len(match.lease_ids) == 1
    again = fetch(target, keys)
    assert (len(again.refs), again.fetched) == (COUNT, 0)
    # Now both are named.
    client = connect(redis)
    until(lambda: all(client.scard(block_name(SPEC.pool_id(), k)) == 2 for k in (keys[0], keys[-1])))
    assert counter(target, "fetched_blocks_total") == COUNT
    assert counter(source, "announced_keys_total") == COUNT
    assert (counter(source, "up"), counter(source, "queued_keys")) == (1, 0)
    for host in (source, target):
        host.settled()
        assert not log(host, "ERROR")


def test_stores_that_the_directory_names_need_no_entry(redis: RedisServer, start_host: StartHost) -> None:
    source, target = start_host(redis.url), start_host(redis.url, "--peer-allow", "")
    keys = source.save(3)
    announced(redis, 3, 2)
    with pytest.raises(InvalidRequestError, match="peer_allow"):
        target.pull(source.address, keys)
    assert fetch(target, keys).fetched == 3


def test_the_part_that_is_here_is_not_fetched(redis: RedisServer, start_host: StartHost) -> None:
    source, target = start_host(redis.url), start_host(redis.url)
    keys = source.save(COUNT)
    target.save(30)
    announced(redis, COUNT, 2)
    match = fetch(target, keys)
    assert (len(match.refs), match.fetched) == (COUNT, COUNT - 30)


def test_who_has_the_most_is_asked(redis: RedisServer, start_host: StartHost) -> None:
    short, long, target = (start_host(redis.url) for _ in range(3))
    keys = long.save(COUNT)
    short.save(20)
    announced(redis, COUNT, 3)
    assert len(fetch(target, keys).refs) == COUNT
    assert short.metric("kvsieve_peer_offered_blocks_total") == 0


def test_many_requests_for_one_prefix_bring_it_once(redis: RedisServer, start_host: StartHost) -> None:
    source, target = start_host(redis.url), start_host(redis.url)
    keys = source.save(COUNT)
    announced(redis, COUNT, 2)
    asked = [keys, keys[:60], [*keys[:50], *chain(20, start=7000)], keys]
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda some: len(target.client.match(some, fetch=ANY).refs), asked))
    assert found == [COUNT, 60, 50, COUNT]
    assert target.metric("kvsieve_peer_pulled_blocks_total") == COUNT


def test_what_a_hand_off_brings_is_not_fetched(redis: RedisServer, start_host: StartHost) -> None:
    source, other, target = (start_host(redis.url) for _ in range(3))
    keys = other.save(COUNT)
    announced(redis, COUNT, 3)
    pull = target.start_pull(source.address, keys, wait_ms=60_000)
    until(lambda: target.metric("kvsieve_peer_pulls") == 1)
    assert fetch(target, keys, Fetch(0.5)).fetched == 0
    assert counter(target, "stale_holders_total") == 0
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(fetch, target, keys)
        source.save(COUNT)
        match = waits.result()
    assert (len(match.refs), match.fetched) == (COUNT, 0)
    assert pull.result().pulled == COUNT
    assert other.metric("kvsieve_peer_offered_blocks_total") == 0


def test_what_a_hand_off_has_not_brought_is_fetched(redis: RedisServer, start_host: StartHost) -> None:
    source, other, target = (start_host(redis.url) for _ in range(3))
    source.save(40)
    keys = other.save(COUNT)
    announced(redis, COUNT, 3)
    pull = target.start_pull(source.address, keys, wait_ms=60_000)
    until(lambda: target.metric("kvsieve_peer_pulls") == 1)
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(fetch, target, keys)
        until(lambda: target.holds(keys) == 40)
        pull.cancel()
        match = waits.result()
    assert (len(match.refs), match.fetched) == (COUNT, COUNT - 40)
    for host in (source, other, target):
        host.settled()


def test_a_fetch_leaves_what_is_held_for_a_hand_off(redis: RedisServer, start_host: StartHost) -> None:
    source, other, target = (start_host(redis.url) for _ in range(3))
    keys = source.save(COUNT)
    announced(redis, COUNT, 3)
    assert source.client.hold(keys, seconds=60.0) == COUNT
    assert fetch(other, keys).fetched == COUNT
    other.settled()
    assert source.metric("kvsieve_peer_holds") == 1
    assert target.pull(source.address, keys).pulled == COUNT
    until(lambda: source.metric("kvsieve_peer_holds") == 0)


def test_what_is_evicted_is_withdrawn(redis: RedisServer, start_host: StartHost) -> None:
    source = start_host(redis.url)
    keys = source.save(COUNT)
    announced(redis, COUNT, 1)
    with AdminClient(source.store.endpoint) as admin:
        admin.evict(SPEC.name, keys=keys[60:61])
        announced(redis, 60, 1)
        admin.clear(SPEC.name)
        announced(redis, 0, 1)
    assert counter(source, "withdrawn_keys_total") == COUNT


def test_a_store_that_ends_leaves(redis: RedisServer, start_host: StartHost) -> None:
    source, target = start_host(redis.url), start_host(redis.url)
    keys = source.save(COUNT)
    announced(redis, COUNT, 2)
    source.store.terminate()
    announced(redis, COUNT, 1)
    assert len(fetch(target, keys).refs) == 0
    assert counter(target, "stale_holders_total") == 0
    # The names that were looked at are gone as well.
    until(lambda: redis.size() < COUNT + 1)


def test_a_store_that_starts_again_holds_nothing(redis: RedisServer, start_host: StartHost) -> None:
    source, target = start_host(redis.url), start_host(redis.url)
    keys = source.save(COUNT)
    announced(redis, COUNT, 2)
    source.store.kill()
    source.store.start()
    # It is another store to the directory, at the address of the dead one.
    assert len(fetch(target, keys).refs) == 0
    source.client.wait_attached(30)
    assert source.save(COUNT) == keys
    until(lambda: len(fetch(target, keys).refs) == COUNT)


def test_a_dead_holder_costs_one_pull(redis: RedisServer, start_host: StartHost) -> None:
    source, target = start_host(redis.url), start_host(redis.url)
    keys = source.save(COUNT)
    announced(redis, COUNT, 2)
    source.store.kill()
    for _ in range(3):
        assert len(fetch(target, keys).refs) == 0
    assert counter(target, "stale_holders_total") == 1


def test_a_silent_holder_costs_one_request_its_patience(redis: RedisServer, start_host: StartHost) -> None:
    source, target = start_host(redis.url), start_host(redis.url)
    keys = source.save(COUNT)
    announced(redis, COUNT, 2)
    assert source.store.process is not None
    source.store.process.send_signal(signal.SIGSTOP)
    try:
        for _ in range(3):
            assert len(fetch(target, keys, Fetch(0.5)).refs) == 0
        assert counter(target, "stale_holders_total") == 1
    finally:
        source.store.process.send_signal(signal.SIGCONT)


def test_what_a_holder_has_not_is_taken_out(redis: RedisServer, start_host: StartHost) -> None:
    source, target = start_host(redis.url), start_host(redis.url)
    keys = source.save(50)
    announced(redis, 50, 2)
    client = connect(redis)
    (number,) = client.smembers(block_name(SPEC.pool_id(), keys[0]))
    more = chain(30, start=50)
    for key in more:
        client.sadd(block_name(SPEC.pool_id(), key), number)
    for _ in range(2):
        assert len(fetch(target, keys + more).refs) == 50
    assert counter(target, "stale_holders_total") == 1
    announced(redis, 50, 2)
    # A pool that the holder does not have is the same.
    for key in chain(30, start=900):
        client.sadd(block_name(SPEC.pool_id(), key), number)
    source.client.close()
    with AdminClient(source.store.endpoint) as admin:
        admin.clear(SPEC.name)
    until(lambda: source.metric("kvsieve_pool_blocks") == 0)
    assert len(fetch(target, chain(30, start=900)).refs) == 0
    assert counter(target, "stale_holders_total") == 2


@pytest.mark.parametrize("address", ["nonsense", "192.0.2.1:9", "", "x" * 1000, "\xff\x00"])
def test_a_directory_that_lies_does_no_harm(redis: RedisServer, start_host: StartHost, address: str) -> None:
    target = start_host(redis.url)
    client = connect(redis)
    keys = chain(10)
    client.set(store_name(5), address.encode("latin-1"))
    for key in keys:
        client.sadd(block_name(SPEC.pool_id(), key), 5, "words", b"\xff", str(2**70), "9" * 5000)
    assert len(fetch(target, keys).refs) == 0
    client.delete(block_name(SPEC.pool_id(), keys[0]))
    client.set(block_name(SPEC.pool_id(), keys[0]), "not a set")
    assert len(fetch(target, keys).refs) == 0
    assert target.save(10) == keys
    assert len(fetch(target, keys).refs) == 10
    assert not log(target, "Traceback")


def test_the_directory_is_killed_and_comes_back_empty(redis: RedisServer, start_host: StartHost) -> None:
    source, target = start_host(redis.url), start_host(redis.url)
    keys = source.save(COUNT)
    announced(redis, COUNT, 2)
    redis.kill()
    # Local hits go on, and so do seals.
    assert len(fetch(source, keys).refs) == COUNT
    assert len(fetch(target, keys).refs) == 0
    more = source.save(50, start=COUNT)
    until(lambda: counter(source, "up") == counter(target, "up") == 0)
    for _ in range(5):
        assert len(fetch(target, keys).refs) == 0
    assert counter(target, "lookups_total") >= 5
    redis.start()
    announced(redis, COUNT + 50, 2)
    assert counter(source, "up") == 1
    until(lambda: counter(target, "up") == 1)
    assert len(fetch(target, keys + more).refs) == COUNT + 50
    for host in (source, target):
        assert (log(host, LOST), log(host, BACK), log(host, "Traceback")) == (1, 1, 0)


def test_a_directory_that_forgets_is_told_again(redis: RedisServer, start_host: StartHost) -> None:
    source = start_host(redis.url, "--directory-ttl", "6")
    source.save(COUNT)
    announced(redis, COUNT, 1)
    redis.cli("flushall")
    announced(redis, COUNT, 1)
    assert not log(source, LOST)


def test_a_directory_that_is_not_there_yet(redis: RedisServer, start_host: StartHost) -> None:
    redis.kill()
    source, target = start_host(redis.url), start_host(redis.url)
    keys = source.save(COUNT)
    assert len(fetch(target, keys).refs) == 0
    redis.start()
    announced(redis, COUNT, 2)
    until(lambda: len(fetch(target, keys).refs) == COUNT)
    assert (log(source, LOST), log(source, BACK)) == (1, 1)


def test_a_directory_that_stands_still(redis: RedisServer, start_host: StartHost) -> None:
    source, target = start_host(redis.url), start_host(redis.url)
    keys = source.save(COUNT)
    announced(redis, COUNT, 2)
    redis.signal(signal.SIGSTOP)
    try:
        for _ in range(3):
            assert len(fetch(target, keys).refs) == 0
        more = source.save(50, start=COUNT)  # nobody waits for it
        assert len(fetch(source, keys + more).refs) == COUNT + 50
        until(lambda: counter(target, "up") == 0)
    finally:
        redis.signal(signal.SIGCONT)
    announced(redis, COUNT + 50, 2)
    until(lambda: len(fetch(target, keys + more).refs) == COUNT + 50)
    assert log(target, LOST) == log(target, BACK) == 1


def test_a_full_directory_is_read(redis: RedisServer, start_host: StartHost) -> None:
    source, target = start_host(redis.url, "--directory-ttl", "60"), start_host(redis.url)
    keys = source.save(COUNT)
    announced(redis, COUNT, 2)
    redis.cli("config", "set", "maxmemory", "1")
    more = source.save(10, start=COUNT)
    until(lambda: counter(source, "up") == 0)
    # Who is said to have the first of a chain is asked for all of it.
    assert len(fetch(target, keys + more).refs) == COUNT + 10
    until(lambda: counter(target, "up") == 0)  # it can't announce what it has now
    assert len(fetch(source, keys + more).refs) == COUNT + 10
    assert "OutOfMemory" in status(source)["directory_down"]
    redis.cli("config", "set", "maxmemory", "0")
    announced(redis, COUNT + 10, 2)


def test_a_wrong_password(start_redis: Callable[..., RedisServer], start_host: StartHost) -> None:
    redis = start_redis("--requirepass", "s3cret")
    right = redis.url.replace("//", "//:s3cret@")
    wrong = redis.url.replace("//", "//user:wr0ng@")
    source, target, other = start_host(right), start_host(wrong), start_host(redis.url)
    keys = source.save(COUNT)
    until(lambda: counter(source, "announced_keys_total") == COUNT)
    for host in (target, other):
        assert len(fetch(host, keys).refs) == 0
        until(lambda host=host: counter(host, "up") == 0)  # type: ignore[misc]
        assert log(host, LOST) == 1
        assert status(host)["directory"] == redis.url
        assert status(host)["directory_down"]
    for host in (source, target, other):
        assert "s3cret" not in host.store.log.read_text()
        assert "wr0ng" not in host.store.log.read_text()


def test_blocks_are_known_for_as_long_as_their_store_lives(redis: RedisServer, start_host: StartHost) -> None:
    source = start_host(redis.url, "--directory-ttl", "3")
    source.save(COUNT)
    announced(redis, COUNT, 1)
    until(lambda: counter(source, "announced_keys_total") > 3 * COUNT)  # again and again
    assert redis.size() == COUNT + 1
    source.store.kill()
    announced(redis, 0, 0)


def test_a_store_that_serves_no_peers_finds_and_tells_nothing(
    redis: RedisServer, start_host: StartHost
) -> None:
    source = start_host(redis.url)
    target = start_host(redis.url, "--peer-listen", "")
    keys = source.save(COUNT)
    announced(redis, COUNT, 1)
    assert len(fetch(target, keys).refs) == COUNT
    target.save(10, start=1000)
    announced(redis, COUNT, 1)
    assert status(target)["directory_address"] == ""


def test_status_says_how_it_stands(redis: RedisServer, start_host: StartHost) -> None:
    source = start_host(redis.url)
    source.save(3)
    announced(redis, 3, 1)
    page = status(source)
    assert (page["directory"], page["directory_down"]) == (redis.url, "")
    assert (page["directory_address"], page["directory_queued"]) == (source.address, 0)
    text = command(source, "status")
    assert f"{redis.url}; up; announces {source.address}, 0 keys queued" in text


def test_settings_that_make_no_sense_are_refused() -> None:
    for flags, words in (
        (["--directory", "memcached://x"], "--directory"),
        (["--directory", "redis://x:notaport/0"], "directory"),
        (["--directory", "redis://x", "--peer-listen", "127.0.0.1:0"], "peer_advertise"),
        (["--peer-advertise", "unix:///x"], "peer-advertise"),
    ):
        run = subprocess.run(
            [
                sys.executable,
                "-m",
                "kvsieve_store.cli.main",
                "serve",
                *flags,
            ],
            capture_output=True,
            text=True,
        )
        assert run.returncode != 0
        assert words in run.stderr.replace("-", "_") or words in run.stderr, run.stderr


@pytest.fixture
def cluster() -> Iterator[RedisCluster]:
    if reason := why_missing():
        pytest.skip(reason)
    nodes = RedisCluster()
    try:
        yield nodes.start()
    finally:
        nodes.close()


def test_a_cluster(cluster: RedisCluster, start_host: StartHost) -> None:
    source, target = start_host(cluster.url), start_host(cluster.url)
    keys = source.save(COUNT)
    announced(cluster, COUNT, 2)
    assert all(node.size() for node in cluster.nodes)
    assert len(fetch(target, keys).refs) == COUNT
    # A node dies, and with it a third of the names; then it is back, empty.
    cluster.nodes[2].kill()
    more = source.save(50, start=COUNT)
    until(lambda: counter(source, "up") == 0)
    assert len(fetch(source, keys + more).refs) == COUNT + 50
    assert len(fetch(target, keys).refs) == COUNT
    cluster.nodes[2].start()
    announced(cluster, COUNT + 50, 2)
    until(lambda: len(fetch(target, keys + more).refs) == COUNT + 50)
    assert not log(source, "Traceback")


def status(host: Host) -> Any:
    return json.loads(command(host, "status", "--format", "json"))


def command(host: Host, *words: str) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "kvsieve_store.cli.main", "--endpoint", host.store.endpoint, *words],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_a_pull_without_a_source_needs_a_directory(start_host: StartHost) -> None:
    import grpc

    host = start_host("local")
    request = pb.PullRequest(session_id=host.session_id, keys=b"".join(chain(2)), timeout_ms=1000)
    with pytest.raises(grpc.RpcError) as caught:
        host.peer.Pull(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len(fetch(host, chain(2)).refs) == 0
    assert host.client.attachment is not None
    assert not host.client.attachment.directory
