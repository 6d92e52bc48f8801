"""Sparse mode of dense GQA models: the query picks the blocks that a decode step attends to.

What of a request is in vLLM's pool and what in the arena is decided as for DSA models (sparse/). selectors:
what is kept of a block's keys, and which blocks a query picks. packing, pages, contexts: where blocks are and
what they hold. runtime: a step's batch. backend: vLLM's attention on a CPU, over what was picked.
"""
