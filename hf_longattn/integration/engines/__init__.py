"""Engines that call an attention function with arguments of their own, one file each."""
