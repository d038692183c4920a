"""A load generator for any endpoint with an OpenAI-compatible HTTP API, ours or another."""
