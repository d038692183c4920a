"""The OpenAI-compatible HTTP API: routes, request and response formats, authentication and limits."""
