"""Sharing: adapters, model cards, checkpoints, the Hub."""
