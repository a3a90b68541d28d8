"""Other people's systems: Ray."""
