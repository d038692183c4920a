"""Implementation of `pipelines.benchmark`: one module per command, and the modules they share."""
