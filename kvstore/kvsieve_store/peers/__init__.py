"""Blocks between stores: what one offers, and how another pulls it.

plan.py: what a pull still has to do (no I/O). pull.py: does it. following.py: its part for blocks that are
still being written; coming.py: the other side of that. fetch.py: from whoever the directory knows. offers.py:
the other side, and families.py: which pool it offers. links.py: connections, their turns and counters.
plane.py: this store's end of the data plane. threads.py: calls that block, from the event loop.
"""
