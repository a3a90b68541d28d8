"""Tasks: where the data of each comes from, what a sample is, and how it is scored."""
