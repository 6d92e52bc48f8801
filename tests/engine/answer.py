"""An engine in a process of its own: says "ready", reads prompts, answers, and ends. For test_serving.py.

stdin: JSON, a list of lists of token ids. stdout, last line: JSON, [[tokens], cached tokens] per prompt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.engine.conftest import run_engine
from tests.engine.generate import generate, prompt


def main(model: str, endpoint: str) -> None:
    with run_engine(Path(model), endpoint, dtype="float32") as llm:
        generate(llm, [prompt(8, 77)])
        print("ready", flush=True)
        answers = generate(llm, json.load(sys.stdin))
        print(json.dumps([[answer.tokens, answer.cached] for answer in answers]), flush=True)


if __name__ == "__main__":
    import tests.conftest  # noqa: F401  the environment of engine tests

    main(*sys.argv[1:])
