"""One call of attention: from a config and tensors to a kernel. Nothing here knows a model."""
