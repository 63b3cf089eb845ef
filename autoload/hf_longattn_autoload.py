"""Registers hf_longattn where nobody imports it: torch calls `watch` at the end of its import, in every process.

transformers imports torch in the midst of its own import, so the package waits for `transformers.modeling_utils`. Its one
file for waiting is loaded by its path: importing it by name would import the package.
"""

from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path


def watch() -> None:
    """Import hf_longattn as soon as transformers' models can be built."""
    package = find_spec("hf_longattn")
    if package is None or package.origin is None:
        raise ImportError("hf_longattn_autoload is installed without hf_longattn: install it, or uninstall this")
    spec = spec_from_file_location("hf_longattn_autoload_imports", Path(package.origin).with_name("lazy_imports.py"))
    lazy_imports = module_from_spec(spec)
    spec.loader.exec_module(lazy_imports)
    lazy_imports.when_imported("transformers.modeling_utils", lambda: import_module("hf_longattn"))
