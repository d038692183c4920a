"""The OpenAI-compatible API over HTTP: routes, what they take and give, and who may ask how much."""
