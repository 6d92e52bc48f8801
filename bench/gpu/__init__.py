"""Benchmarks on a CUDA device, with stock vLLM >= 0.33: `python -m bench.gpu NAME`. See bench/README.md."""
