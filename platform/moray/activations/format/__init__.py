"""Implements the on-disk format of an activation cache: schema, codecs, files and manifest."""
