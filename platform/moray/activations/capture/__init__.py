"""Runs the target over planned chats and writes its activations shard by shard."""
