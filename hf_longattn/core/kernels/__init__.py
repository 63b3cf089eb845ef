"""Fast paths. A kernel takes tensors and tables and returns tensors; it knows no method and no model."""
