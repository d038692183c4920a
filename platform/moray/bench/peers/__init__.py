"""Moray beside other engines: the same prompts, interleaved, each engine in an environment of its own."""
