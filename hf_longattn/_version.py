"""The version of this package, for its layers and for the build."""

__version__ = "0.1.0"
