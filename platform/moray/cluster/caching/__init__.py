"""Caches and regenerated chats, made and kept on Ray Data."""
