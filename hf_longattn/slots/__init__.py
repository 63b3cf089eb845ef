"""The slots of a config, the base classes of their methods, and methods by name."""
