"""KV bytes between stores on different hosts: what may be read, and the ways to read it.

base.py: the contract (Link, Listener). wire.py: the frames. memory.py, exports.py: whose bytes, under which
token. tcp.py, shm.py, ucx/: the transports.
"""
