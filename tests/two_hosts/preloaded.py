"""`vllm serve` from a process that has imported vLLM already: seconds, where a new process takes a minute.

Run as a module; a line of JSON on standard input starts an engine: {"args": of `vllm`, "netns": path or "",
"log": path}. The line that comes back is its process id, which is its process group's, too. Engines end with
this process.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import traceback
from typing import Any, NoReturn

from tests import netns

_PR_SET_PDEATHSIG = 1


def main() -> None:
    # What an engine and its core import.
    import vllm.entrypoints.cli.main
    import vllm.entrypoints.openai.api_server
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401

    import kvsieve_connector.connector  # noqa: F401

    # Its children are reaped by the kernel.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            serve(order)
        os.setpgid(pid, pid)
        print(pid, flush=True)


def serve(order: dict[str, Any]) -> NoReturn:
    """In the child."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        null = os.open(os.devnull, os.O_RDONLY)
        for number, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(number, target)
        if order["netns"]:
            netns.enter(order["netns"])
        # The CPU platform asks for "spawn", which would import all of it again.
        fork = multiprocessing.get_context("fork")
        multiprocessing.get_context = lambda method=None: fork  # type: ignore[assignment]
        sys.argv = ["vllm", *order["args"]]
        from vllm.entrypoints.cli.main import main as vllm

        vllm()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
