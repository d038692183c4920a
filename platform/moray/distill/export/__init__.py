"""Exporting a drafter: one folder from which a drafter replica runs, with its model card."""
