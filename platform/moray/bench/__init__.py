"""Benchmarks: the questions that are asked and the report that is written about the answers."""
