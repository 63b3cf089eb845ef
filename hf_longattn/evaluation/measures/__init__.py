"""Measures of a model: one short file each."""
