"""Prefills prompts until it is killed; says "prefilling" when it starts to. For test_engine.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.engine.conftest import run_engine
from tests.engine.generate import prompt


def main(model: str, endpoint: str) -> None:
    from vllm import SamplingParams

    with run_engine(Path(model), endpoint, max_num_batched_tokens=64, max_num_seqs=1) as llm:
        print("prefilling", flush=True)
        seed = 0
        while True:
            llm.llm_engine.add_request(
                f"r{seed}", {"prompt_token_ids": prompt(1800, seed)}, SamplingParams(max_tokens=1)
            )
            while llm.llm_engine.has_unfinished_requests():
                llm.llm_engine.step()
            seed += 1


if __name__ == "__main__":
    import tests.conftest  # noqa: F401  the environment of engine tests

    main(*sys.argv[1:])
