"""Drafts that are made in another process: what crosses, who answers, and how it gets there. No Ray."""
