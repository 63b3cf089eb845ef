"""python -m hf_longattn.cli, which is what `accelerate launch -m` runs."""

from . import app

app()
