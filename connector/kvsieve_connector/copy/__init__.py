"""Copy engines: move blocks between a worker's paged cache and the arena. One per kind of device."""
