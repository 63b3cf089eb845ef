"""What single engines of the transformers stack hand to an attention function, one file each."""
