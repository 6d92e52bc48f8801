"""Sparse mode: the main plane in the arena, a hot buffer per request on the GPU, the indexer plane as ever.

plan: the numbers. spec, manager, residency: what vLLM's scheduler keeps of a request on the GPU. scheduler,
hosts, budget: what of it is in the arena. The rest runs in the workers.
"""
