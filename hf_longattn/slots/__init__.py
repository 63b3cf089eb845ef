"""What methods are made of: the slots of a config, what each asks of its methods, and methods by name."""
