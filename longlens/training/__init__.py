"""Training: from a task and a mixer to a run folder with its result."""
