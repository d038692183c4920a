"""Builds and maintains caches, and regenerates chats, on Ray Data."""
