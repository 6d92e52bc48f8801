"""NIXL moving host memory, for an interpreter that has nixl_cu12 and numpy, and need not have kvsieve.

`serve BYTES` prints where its memory is; `read BYTES` reads from there what the lines of its input say. Each
line is JSON. Both end with their input.
"""

import base64
import json
import os
import sys
import time

import numpy as np
from nixl_cu12._api import nixl_agent, nixl_agent_config


def serve(size: int) -> None:
    memory = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    agent = nixl_agent("serve", nixl_agent_config(backends=["UCX"]))
    agent.register_memory([(memory.ctypes.data, size, 0, "")], "DRAM")
    metadata = base64.b64encode(agent.get_agent_metadata()).decode()
    say({"metadata": metadata, "base": memory.ctypes.data})
    sys.stdin.read()


def read(size: int) -> None:
    """The first line is what `serve` printed. Of the others: {"from": offsets, "into": offsets, "size": bytes
    of each} is prepared, {"go": 1} is read once and answered with its seconds and some of its bytes."""
    memory = np.zeros(size, np.uint8)
    # It polls by itself while it waits; a thread that polls, too, would take the server's core.
    agent = nixl_agent("read", nixl_agent_config(backends=["UCX"], enable_prog_thread=False))
    agent.register_memory([(memory.ctypes.data, size, 0, "")], "DRAM")
    there = json.loads(sys.stdin.readline())
    peer = agent.add_remote_agent(base64.b64decode(there["metadata"]))
    local = remote = None
    indices: list[int] = []
    for line in sys.stdin:
        asked = json.loads(line)
        if "go" not in asked:
            length = asked["size"]
            local = prepared(agent, "NIXL_INIT_AGENT", memory.ctypes.data, asked["into"], length)
            remote = prepared(agent, peer, there["base"], asked["from"], length)
            indices = list(range(len(asked["from"])))
            continue
        started = time.perf_counter()
        handle = agent.make_prepped_xfer("READ", local, indices, remote, indices)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        seconds = time.perf_counter() - started
        agent.release_xfer_handle(handle)
        say({"state": state, "seconds": seconds, "sum": int(memory[:: 1 << 12].sum())})


def prepared(agent: nixl_agent, name: str, base: int, offsets: list[int], size: int) -> object:
    return agent.prep_xfer_dlist(name, [(base + offset, size, 0) for offset in offsets], "DRAM")


def say(line: dict[str, object]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    {"serve": serve, "read": read}[sys.argv[1]](int(sys.argv[2]))
    os._exit(0)  # 1.5.1 may crash in what it does at the end of a process
