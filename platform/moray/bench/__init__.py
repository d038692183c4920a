"""Evaluations and benchmarks: questions, measurements, load generation, comparisons with other engines, and reports."""
