"""The transport over UCX: one-sided reads where the wire does them in hardware or in the kernel, active
messages on any other. kvucx.c: the binding to libucp. engine.py: its thread. lanes.py: which way an endpoint
goes."""
