"""Reads shards into training batches."""
