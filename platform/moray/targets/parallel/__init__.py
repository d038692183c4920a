"""A target over several processes of one machine, each with a share of every layer (tensor parallelism)."""
