"""What leaves this machine: adapters, model cards, checkpoints, the Hub."""
