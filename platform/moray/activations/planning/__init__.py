"""Plans the contents, size and duration of a cache before it is written."""
