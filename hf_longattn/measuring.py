"""The former name of `hf_longattn.evaluation`."""

import sys
import warnings
from importlib import import_module

#: What was public below this name, and where it is now.
_MOVED = {
    "evaluation": "",
    "evaluation.long_ppl": ".measures.long_ppl",
    "diagnostics": ".measures.diagnostics",
    "probe": ".measures.probe",
    "report": ".report",
    "settings": ".settings",
    "tasks": ".tasks",
}

warnings.warn("hf_longattn.measuring is hf_longattn.evaluation now", DeprecationWarning, stacklevel=2)
for _old, _new in _MOVED.items():
    sys.modules[f"{__name__}.{_old}"] = globals()[_old] = import_module(f"hf_longattn.evaluation{_new}")
