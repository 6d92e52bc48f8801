"""Which rows a sparse model asks for, step by step, and how hot buffers of several sizes and policies fare.

`record` and `synthetic` make traces, `hot_buffer` and `simulate` run them, `waits` turns rows into time,
`measure` is the benchmark.
"""

from bench.traces.measure import main, measure

__all__ = ["main", "measure"]
