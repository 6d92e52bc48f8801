"""An engine in a process of its own, driven by JSON lines.

In: {"do": "add" | "abort" | "counters" | "stop", ...}.
Out: {"ready"}; {"id", "tokens", "params"} of each request that has finished; {"counters", "computed", "left",
"attached", "pool"}, the last one the hex of its PoolSpec.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.engine.conftest import run_engine
from tests.engine.generate import connector_of, counters


def say(**what: Any) -> None:
    print(json.dumps(what), file=sys.__stdout__, flush=True)


def computed_tokens(llm: Any) -> int:
    """Prompt tokens that this engine has computed."""
    name, source = "vllm:prompt_tokens_by_source", "local_compute"
    return sum(int(m.value) for m in llm.get_metrics() if m.name == name and source in m.labels.values())


def pool_of(llm: Any) -> str:
    """Hex of the engine's PoolSpec; empty without a store."""
    client = getattr(connector_of(llm)._session, "_client", None)
    return "" if client is None else client._core._hello.pool.SerializeToString().hex()


def main(model: str, endpoint: str, settings: str) -> None:
    from vllm import SamplingParams

    orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            orders.put(json.loads(line))
        orders.put(None)

    threading.Thread(target=read, daemon=True).start()
    with run_engine(Path(model), endpoint or None, disable_log_stats=False, **json.loads(settings)) as llm:
        engine = llm.llm_engine
        scheduler = engine.engine_core.engine_core.scheduler
        say(ready=True)
        while True:
            busy = scheduler.has_requests()
            try:
                order = orders.get(timeout=0.0 if busy else 0.02)
            except queue.Empty:
                order = {}
            match order and order.get("do"):
                case None if order is None:
                    return
                case "add":
                    params = SamplingParams(
                        temperature=0,
                        max_tokens=order["max_tokens"],
                        ignore_eos=True,
                        detokenize=False,
                        extra_args={"kv_transfer_params": order["params"]} if order["params"] else None,
                    )
                    engine.add_request(order["id"], {"prompt_token_ids": order["prompt"]}, params)
                case "abort":
                    engine.abort_request([order["id"]])
                case "counters":
                    half = connector_of(llm)._scheduler
                    left = len(half._requests) + len(half._saves) + len(half._arrivals)
                    say(
                        counters=counters(llm),
                        computed=computed_tokens(llm),
                        left=left,
                        attached=half._attachment() is not None,
                        pool=pool_of(llm),
                    )
                case "stop":
                    return
            if scheduler.has_requests():
                for output in engine.step():
                    if output.finished:
                        say(
                            id=output.request_id,
                            tokens=list(output.outputs[0].token_ids),
                            params=output.kv_transfer_params,
                        )
                time.sleep(0.001)


if __name__ == "__main__":
    import tests.conftest  # noqa: F401  the environment of engine tests

    main(*sys.argv[1:])
