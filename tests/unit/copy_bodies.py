"""What gather_context, fetch_pages and copy_pieces must do: run on the references and on the kernels."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from kvsieve_connector.kernels.tables import COUNTERS, LayerCache, RequestTables

BLOCK_TOKENS = 64


def _bytes(device: str, seed: int, *shape: int) -> torch.Tensor:
    random = torch.Generator(device).manual_seed(seed)
    return torch.randint(256, shape, dtype=torch.uint8, device=device, generator=random)


def _host(device: str, data: torch.Tensor) -> torch.Tensor:
    """The same bytes in memory of the host that the device can read."""
    host = torch.empty(data.shape, dtype=data.dtype, pin_memory=device != "cpu")
    host.copy_(data)
    return host


def fp8_rows(device: str, seed: int, n: int) -> torch.Tensor:
    """uint8 [n, 656]: any e4m3 but NaN, scales of all sizes, any bf16 tail but NaN."""
    rows = _bytes(device, seed, n, 656)
    rows[:, :512] = torch.where(rows[:, :512] & 0x7F == 0x7F, 0, rows[:, :512])
    random = torch.Generator(device).manual_seed(seed)
    scales = torch.randn(n, 4, device=device, generator=random).exp().pow(3)
    rows[:, 512:528] = scales.contiguous().view(torch.uint8)
    rows[:, 528:] = torch.randn(n, 64, device=device, generator=random).bfloat16().view(torch.uint8)
    return rows


def convert_by_hand(rows: torch.Tensor) -> torch.Tensor:
    """bf16 [n, 576], tile by tile, in float64 up to the one product that fp32 rounds."""
    if rows.shape[1] == 1152:
        return rows.contiguous().view(torch.bfloat16)
    parts = []
    for tile in range(4):
        values = rows[:, tile * 128 : (tile + 1) * 128].contiguous().view(torch.float8_e4m3fn).double()
        scale = rows[:, 512 + 4 * tile : 516 + 4 * tile].contiguous().view(torch.float32).double()
        parts.append((values * scale).float().bfloat16())
    return torch.cat([*parts, rows[:, 528:].contiguous().view(torch.bfloat16)], 1)


def gather(module: ModuleType, device: str, row_bytes: int, lengths: list[int], staged: bool) -> None:
    """Blocks of all kinds; the first request has no table slot; rows of dst between them stay as they are."""
    size, per_request = BLOCK_TOKENS * row_bytes, max(lengths) // BLOCK_TOKENS + 1
    n, blocks = len(lengths), len(lengths) * per_request
    tokens = blocks * BLOCK_TOKENS
    rows = fp8_rows(device, 1, tokens) if row_bytes == 656 else _finite_bf16(device, tokens)
    truth = rows.view(n, per_request, size)
    pool = _bytes(device, 2, 2 * blocks, 2, size)
    cache = pool[:, 1].view(2 * blocks, BLOCK_TOKENS, row_bytes)
    offset = 96
    arena = _host(device, torch.zeros(blocks, offset + size + 16, dtype=torch.uint8, device=device))
    staging = _bytes(device, 3, blocks, size + 32)
    block_table = torch.zeros(n, per_request + 2, dtype=torch.int32)
    page = torch.zeros(n + 1, per_request, dtype=torch.int32)
    page_addr = torch.zeros(blocks + 1, dtype=torch.int64)
    copies = torch.full((n, per_request), -1, dtype=torch.int32)
    slots = torch.tensor([-1, *range(n, 1, -1)][:n], dtype=torch.int32)
    order = torch.randperm(2 * blocks, generator=torch.Generator().manual_seed(4)).tolist()
    for i in range(n):
        for b in range(per_request):
            number = i * per_request + b + 1
            kind = "gpu" if i == 0 or b == per_request - 1 else ("gpu", "host", "host", "staged")[number % 4]
            if kind == "gpu" or (kind == "staged" and not staged):
                block_table[i, b] = order[number]
                cache[order[number]] = truth[i, b].view(BLOCK_TOKENS, row_bytes)
                continue
            page[int(slots[i]), b] = number
            page_addr[number] = arena[number - 1].data_ptr()
            if kind == "staged":
                copies[i, b] = blocks - number
                staging[blocks - number, :size] = truth[i, b]
            else:
                arena[number - 1, offset : offset + size].copy_(truth[i, b])
    starts, at = [], 1
    for length in lengths:
        starts.append(at)
        at += length + 3
    dst = torch.full((at, 576), 77, dtype=torch.bfloat16, device=device)
    want = dst.clone()
    for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        want[start : start + length] = convert_by_hand(truth[i].reshape(-1, row_bytes)[:length])
    on = lambda tensor: tensor.to(device)  # noqa: E731
    tables = RequestTables(
        row_slot=torch.zeros(1, dtype=torch.int32, device=device),
        page=on(page),
        page_addr=on(page_addr),
        hot_blocks=torch.zeros(1, n + 1, 1, dtype=torch.int32, device=device),
    )
    module.gather_context(
        dst,
        layer_of(cache, tables, offset),
        tables,
        on(block_table)[:, :per_request],
        on(slots),
        on(torch.tensor(starts, dtype=torch.int32)),
        on(torch.tensor(lengths, dtype=torch.int32)),
        *((on(copies), staging) if staged else ()),
    )
    assert torch.equal(dst.view(torch.int16), want.view(torch.int16))


def _finite_bf16(device: str, n: int) -> torch.Tensor:
    random = torch.Generator(device).manual_seed(1)
    return torch.randn(n, 576, device=device, generator=random).bfloat16().view(torch.uint8)


def layer_of(cache: torch.Tensor, tables: RequestTables, layer_offset: int) -> LayerCache:
    """A layer whose hot buffer is not used."""
    slots, hot_rows = tables.page.shape[0], tables.hot_blocks.shape[2] * cache.shape[1]

    def full(value: int, *shape: int, dtype: Any = torch.int32) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=cache.device)

    return LayerCache(
        cache=cache,
        layer_offset=layer_offset,
        group=0,
        slot_of=full(-1, len(tables.page_addr) * cache.shape[1], dtype=torch.int16),
        tag=full(-1, slots, hot_rows),
        stamp=full(0, slots, hot_rows),
        clock=full(0, slots, 2),
        counters=full(0, slots, len(COUNTERS), dtype=torch.int64),
    )


GATHERS = {
    "fp8": (656, [150, 64, 1, 321], False),
    "fp8 staged": (656, [400, 512, 333], True),
    "bf16": (1152, [63, 65, 200], False),
    "bf16 staged": (1152, [300, 411], True),
    "nothing": (656, [0, 5, 0], False),
}


def fetch(module: ModuleType, device: str, pages: int, page_bytes: int, n_blocks: int) -> None:
    source = _bytes(device, 5, pages, page_bytes + 48)
    host = _host(device, source)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(6))
    addresses = torch.tensor([host[int(i), 32:].data_ptr() for i in order], dtype=torch.int64, device=device)
    staging = _bytes(device, 7, pages + 2, page_bytes)
    want = staging.clone()
    want[:pages] = source[order.to(device), 32 : 32 + page_bytes]
    module.fetch_pages(staging, addresses, n_blocks)
    assert torch.equal(staging, want)


FETCHES = {
    "one": (1, 41984, 1),
    "many": (37, 41984, 2),
    "bf16": (5, 73728, 3),
    "small": (9, 16, 2),
    "none": (0, 64, 1),
}


def copy(module: ModuleType, device: str, to_host: bool, sizes: list[int]) -> None:
    """Pieces of many sizes, with gaps between them."""
    room = max(sizes) + 32
    source, target = _bytes(device, 8, len(sizes), room), _bytes(device, 9, len(sizes), room)
    want = target.clone()
    for i, size in enumerate(sizes):
        want[i, 16 : 16 + size] = source[-1 - i, :size]
    src, dst = (source, _host(device, target)) if to_host else (_host(device, source), target)

    def on(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    n = range(len(sizes))
    module.copy_pieces(
        on([src[-1 - i].data_ptr() for i in n]),
        on([dst[i, 16:].data_ptr() for i in n]),
        on(sizes),
    )
    if device != "cpu":
        torch.cuda.synchronize()
    assert torch.equal(dst.to(device), want)


SIZES = [41984, 16, 0, 73728, 41984, 1024, 48]
