"""Exporting a drafter: one folder that a drafter replica runs from, with its model card."""
