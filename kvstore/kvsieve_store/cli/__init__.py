"""The `kvsieve` command: the store process, and what operators ask of it."""
