"""What `pipelines.benchmark` runs: one module for each command, and the modules they share."""
