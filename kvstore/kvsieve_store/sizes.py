"""Bytes as people read them."""

from __future__ import annotations


def size(count: int, decimals: int = 1) -> str:
    """512 B, 1.5 GiB, 8 GiB."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    text = f"{value:.{decimals}f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} {units[0]}"


def exact_size(count: int) -> str:
    """As size(), with the bytes behind it where that is rounded: 1 GiB (1073741825 bytes)."""
    text = size(count)
    unit = 1024 ** ["B", "KiB", "MiB", "GiB", "TiB", "PiB"].index(text.split()[1])
    return text if float(text.split()[0]) * unit == count else f"{text} ({count} bytes)"
