"""What the store and its clients agree on: specs, the arena's geometry, limits. No I/O."""
