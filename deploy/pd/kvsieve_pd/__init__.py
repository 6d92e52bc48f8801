"""Prefill on some hosts, decode on others: the proxy in front of both, and all of it on one machine."""
