"""Quality of block top-k: what a dense model loses when decode steps attend to the blocks that are picked.

texts: what is read. reference: the model, in transformers, with the attention of sparse mode. engine: a
real vLLM engine against it. recall, misses and measure: the numbers.
"""
