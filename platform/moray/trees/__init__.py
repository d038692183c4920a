"""Token trees: their shapes, their masks, and how they grow level by level."""
