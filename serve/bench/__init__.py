"""Benchmarks that deploy the application themselves, as the load generator of the library may not."""
