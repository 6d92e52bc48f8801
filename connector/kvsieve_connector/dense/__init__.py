"""Sparse mode of dense GQA models: the query picks the blocks that a decode step attends to."""
