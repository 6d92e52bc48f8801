"""The worker's tables: what is written to the device, and when."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from kvsieve_connector.sparse.tables import HostTables, TableSizes  # noqa: E402

SIZES = TableSizes(slots=2, blocks=8, pages=7, groups=2, hot_blocks=2, layers=3, block_tokens=4, rows=4)


@pytest.fixture
def tables() -> HostTables:
    return HostTables(SIZES, torch.device("cpu"))


def hot(first: int) -> tuple[tuple[int, ...], ...]:
    return ((first, first + 1), (first + 2, first + 3))


def test_nothing_is_on_the_device_before_flush(tables: HostTables) -> None:
    tables.begin("a", hot(10))
    tables.add("a", [(0, 4096), (3, 8192)])
    tables.set_rows(["x", "a"])
    assert not tables.requests.page.any()
    assert tables.requests.row_slot.tolist() == [-1] * 4
    tables.flush()
    slot = tables.slot("a")
    assert tables.requests.row_slot.tolist() == [SIZES.slots, slot, -1, -1]
    pages = tables.requests.page[slot]
    assert [int(pages[i] > 0) for i in range(8)] == [1, 0, 0, 1, 0, 0, 0, 0]
    assert tables.requests.page_addr[pages[[0, 3]].long()].tolist() == [4096, 8192]
    assert tables.requests.hot_blocks[:, slot].tolist() == [[10, 11], [12, 13]]
    assert [list(x) for x in tables.host_pages("a")] == [[0, 3], [4096, 8192]]


def test_a_slot_and_pages_of_an_ended_request_come_back_clean(tables: HostTables) -> None:
    tables.begin("a", hot(10))
    tables.add("a", [(i, 4096 * (i + 1)) for i in range(6)])
    tables.flush()
    slot = tables.slot("a")
    tables.tag[:, slot], tables.stamp[:, slot], tables.clock[:, slot] = 5, 6, 7
    tables.slot_of.fill_(1)
    tables.end("a")
    tables.end("a")
    assert tables.slot("a") == -1
    tables.begin("b", hot(20))
    tables.begin("c", hot(30))
    tables.add("c", [(2, 64 * 1024)])
    tables.flush()
    for request in ("b", "c"):
        new = tables.slot(request)
        assert tables.tag[:, new].eq(-1).all()
        assert not tables.stamp[:, new].any()
        assert not tables.clock[:, new].any()
    assert tables.requests.page[tables.slot("b")].tolist() == [0] * 8
    page = int(tables.requests.page[tables.slot("c"), 2])
    rows = tables.slot_of.view(3, 7, 4)
    assert rows[:, page].eq(-1).all()
    assert tables.requests.page_addr[page] == 64 * 1024
    assert tables.requests.hot_blocks[:, tables.slot("c")].tolist() == [[30, 31], [32, 33]]


def test_a_request_that_ends_before_flush_leaves_nothing(tables: HostTables) -> None:
    tables.begin("a", hot(10))
    tables.add("a", [(1, 4096)])
    tables.end("a")
    tables.flush()
    assert not tables.requests.page.any()
    assert not tables.requests.page_addr.any()


def test_rows_are_written_only_when_the_batch_changes(tables: HostTables) -> None:
    tables.begin("a", hot(1))
    tables.set_rows(["a"])
    tables.flush()
    tables.requests.row_slot.fill_(3)
    tables.set_rows(["a"])
    tables.flush()
    assert tables.requests.row_slot.tolist() == [3] * 4
    tables.clear_rows()
    assert tables.requests.row_slot.tolist() == [-1] * 4
    tables.set_rows(["a"])
    tables.flush()
    assert tables.requests.row_slot.tolist() == [tables.slot("a"), -1, -1, -1]


def test_more_than_the_tables_hold_is_an_error(tables: HostTables) -> None:
    tables.begin("a", hot(1))
    with pytest.raises(RuntimeError, match="no table slot for request a"):
        tables.begin("a", hot(1))
    tables.begin("b", hot(1))
    with pytest.raises(RuntimeError, match="no table slot for request c of 2"):
        tables.begin("c", hot(1))
    tables.add("a", [(i, 4096) for i in range(6)])
    with pytest.raises(RuntimeError, match="no page for block 6"):
        tables.add("a", [(6, 4096)])
    with pytest.raises(RuntimeError, match="no page for block 0"):
        tables.add("a", [(0, 4096)])


def test_marks_are_equal_where_slots_and_pages_are() -> None:
    ranks = [HostTables(SIZES, torch.device("cpu")) for _ in range(3)]
    marks = [rank.mark() for rank in ranks]
    seen = {0}
    steps = [
        lambda tables: tables.begin("a", hot(10)),
        lambda tables: tables.add("a", [(0, 4096), (3, 8192)]),
        lambda tables: (tables.end("a"), tables.begin("a", hot(10))),
        lambda tables: tables.add("a", [(0, 4096), (3, 8192)]),
    ]
    for step in steps:
        for rank in ranks[:2]:
            step(rank)
            rank.flush()
        assert marks[0] == marks[1]
        assert int(marks[0]) not in seen
        assert int(marks[0]) % (1 << 32) == 0
        seen.add(int(marks[0]))
    other = ranks[2]
    other.begin("a", hot(10))
    other.add("a", [(3, 8192), (0, 4096)])  # the same blocks get other pages
    other.flush()
    assert int(marks[2]) not in seen


def test_addresses_may_differ_between_ranks() -> None:
    ranks = [HostTables(SIZES, torch.device("cpu")) for _ in range(2)]
    marks = [rank.mark() for rank in ranks]
    for number, rank in enumerate(ranks):
        rank.begin("a", hot(10))
        rank.add("a", [(0, 4096 + 64 * number)])
        rank.flush()
    assert marks[0] == marks[1] != 0
