"""What is measured of a model: one short file each."""
