"""Turns a dense target into a sparse one: trains routers and low-rank changes of its attention (D-LLM)."""
