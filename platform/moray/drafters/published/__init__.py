"""Drafters in the layouts that other engines load and that others publish."""
