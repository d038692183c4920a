"""Decoding, lossless unless asked otherwise: one loop for one sequence or many, with drafts or without."""
