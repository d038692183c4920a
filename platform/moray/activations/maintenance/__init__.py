"""Verifies, measures and compacts existing caches."""
