"""A load generator for endpoints that speak OpenAI's HTTP interface: ours, and others."""
