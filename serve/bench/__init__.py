"""Benchmarks that deploy the application themselves, which the library's load generator must not do."""
