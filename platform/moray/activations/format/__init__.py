"""What an activation cache is on disk: its schema, codecs, files and manifest."""
