"""The directory: which stores hold a key, in Redis or Valkey.

announcements.py: what it has to be told (no I/O). holders.py: whom to ask for a chain (no I/O). table.py:
what lies where in Redis. directory.py: this store's part in it, and what happens while it is gone.
"""
