"""kvucx.c as Python sees it. It is built with the package where libucp's headers are; else UCX is missing."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_char_p, c_int, c_int32, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from kvsieve_store.errors import UnavailableError

HEADER_BYTES = 32

EV_DONE, EV_REQUEST, EV_FAILED, EV_CLOSED = 1, 2, 3, 4

OK = 0


class Event(ctypes.Structure):
    """kv_event."""

    _fields_ = (
        ("type", c_uint32),
        ("refused", c_uint32),
        ("status", c_int32),
        ("pad", c_uint32),
        ("id", c_uint64),
        ("ptr", c_void_p),
        ("size", c_uint64),
    )


_STATUS = POINTER(c_int)
_TEXTS = POINTER(c_char_p)

# Calls that return at once keep the GIL; those that may work for long release it.
_QUICK: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "kv_status": (c_char_p, (c_int,)),
    "kv_version": (None, (POINTER(c_uint),)),
    "kv_wake": (None, (c_void_p,)),
    "kv_address": (c_size_t, (c_void_p, c_void_p, c_size_t)),
    "kv_connect": (c_void_p, (c_void_p, c_char_p, _STATUS)),
    "kv_describe": (c_size_t, (c_void_p, c_void_p, c_size_t)),
    "kv_ask": (c_int, (c_void_p, c_uint64, c_char_p, c_char_p, c_size_t, c_size_t, c_void_p, c_void_p)),
    "kv_answer": (c_int, (c_void_p, c_uint64, c_char_p, c_size_t, c_void_p, c_void_p)),
    "kv_pack_key": (c_size_t, (c_void_p, c_void_p, c_void_p, c_size_t)),
    "kv_unpack_key": (c_void_p, (c_void_p, c_char_p, _STATUS)),
    "kv_drop_key": (None, (c_void_p,)),
}
_SLOW: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "kv_open": (c_void_p, (_TEXTS, _TEXTS, c_int, c_size_t, _STATUS)),
    "kv_close": (None, (c_void_p,)),
    "kv_run": (c_int, (c_void_p, POINTER(Event), c_int, c_int)),
    "kv_disconnect": (None, (c_void_p,)),
    "kv_get": (
        c_int,
        (c_void_p, c_uint64, c_size_t, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
    ),
    "kv_map": (c_void_p, (c_void_p, c_void_p, c_size_t, _STATUS)),
    "kv_unmap": (None, (c_void_p, c_void_p)),
}


class Library:
    """The functions of kvucx.c, by name."""

    def __init__(self, path: Path) -> None:
        """Raises OSError when libucp is not there."""
        for functions, library in ((_QUICK, ctypes.PyDLL(str(path))), (_SLOW, ctypes.CDLL(str(path)))):
            for name, (result, arguments) in functions.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
                setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def status(self, code: int) -> str:
        """UCX's words for a status."""
        return str(self.kv_status(code).decode())

    @property
    def version(self) -> str:
        """Of libucp, as 1.13.1."""
        numbers = (c_uint * 3)()
        self.kv_version(numbers)
        return ".".join(map(str, numbers))


@functools.cache
def load() -> Library:
    """Raises UnavailableError, which says what is missing."""
    found = sorted(Path(__file__).parent.glob("_kvucx*.so"))
    if not found:
        raise UnavailableError(
            "ucx: this installation was built without it; install libucx-dev (1.13 or later) and a C "
            "compiler, then install kvsieve again"
        )
    try:
        return Library(found[0])
    except OSError as error:
        raise UnavailableError(f"ucx: {error}; install libucx0 (1.13 or later)") from None


def why_missing() -> str | None:
    """Why UCX can't be used here; None when it can."""
    try:
        load()
    except UnavailableError as error:
        return str(error)
    return None
