"""The project's benchmarks: one module, and one command, per number. README.md says how each is run."""
