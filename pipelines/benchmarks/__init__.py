"""Benchmark rigs: one module for each command of `pipelines.benchmark`, and what it stands on."""
