"""Pass keys asked of a real vLLM engine in sparse mode, in a pool too small for the prompt.

What it thought of each token that it said is held against the reference.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from typing import Any

from bench.overhead import ENVIRON
from bench.quality.reference import BLOCK_TOKENS, FIRST, NEWEST, Picks, Reference
from bench.quality.texts import Case
from kvsieve_store.bench.store import TemporaryStore

_ANSWER = 16
_CHUNK = 512


def engine_needles(
    path: Any, decode: Callable[[list[int]], str], model: Reference, asked: Sequence[Case], picks: Picks
) -> list[dict[str, Any]]:
    """One row. pool_blocks: of BLOCK_TOKENS tokens, vLLM's own count; distance: largest difference of a
    token's logprob to the reference's, nats, of tokens that decode said."""
    os.environ.update(ENVIRON)
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    settings = {
        "kvsieve.mode": "sparse",
        "kvsieve.budget_tokens": picks.budget_tokens,
        "kvsieve.selector": picks.selector,
        "kvsieve.dense_layers": picks.dense_layers,
        "kvsieve.first_blocks": FIRST,
        "kvsieve.window_blocks": NEWEST,
    }
    params = SamplingParams(temperature=0, max_tokens=_ANSWER, ignore_eos=True, logprobs=0, detokenize=False)
    with TemporaryStore("--pool-size", "1GiB") as store:
        llm = LLM(
            str(path),
            dtype="float32",
            block_size=BLOCK_TOKENS,
            max_model_len=8192,
            max_num_seqs=4,
            max_num_batched_tokens=_CHUNK,
            enforce_eager=True,
            kv_cache_memory_bytes=64 << 20,
            kv_transfer_config=KVTransferConfig(
                kv_connector="KVSieveConnector",
                kv_connector_module_path="kvsieve_connector.connector",
                kv_role="kv_both",
                kv_connector_extra_config={"kvsieve.endpoint": store.endpoint, **settings},
            ),
        )
        blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
        prompts = [{"prompt_token_ids": case.prompt + case.answer} for case in asked]
        outputs = [llm.generate([each], params, use_tqdm=False)[0].outputs[0] for each in prompts]
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
    distances = [_distance(model, case, output, picks) for case, output in zip(asked, outputs, strict=True)]
    found = [
        decode(case.key).strip() in decode(list(output.token_ids))
        for case, output in zip(asked, outputs, strict=True)
    ]
    return [
        {
            "part": "engine",
            "tokens": asked[0].tokens,
            **vars(picks),
            "cases": len(found),
            "accuracy": round(sum(found) / len(found), 4),
            "pool_blocks": blocks,
            "pool_of_dense": round(blocks * BLOCK_TOKENS / (asked[0].tokens + _ANSWER), 3),
            "distance": round(max(distances), 5),
        }
    ]


def _distance(model: Reference, case: Case, output: Any, picks: Picks) -> float:
    """The first token comes of the prompt, and is exact; the rest of decode."""
    said = list(output.token_ids)
    logprobs = model.decode(model.prefill(case.prompt + case.answer), said[:-1], picks).log_softmax(-1)
    return max(
        abs(float(logprobs[i, token]) - output.logprobs[i + 1][token].logprob)
        for i, token in enumerate(said[1:])
    )
