"""From shards to training batches."""
