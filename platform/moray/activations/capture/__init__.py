"""The target over planned chats, written shard by shard."""
