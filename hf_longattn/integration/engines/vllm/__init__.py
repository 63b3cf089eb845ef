"""Every method in vLLM, on its Transformers backend.

The entry point `vllm.general_plugins` calls `register` in every process of vLLM. From then on a checkpoint of ours, whatever
it names as its architecture, goes to vLLM's own Transformers class for it with `model.Served` in front:

    resolution   which checkpoints are ours, which class they get, and what the caller is told before weights are read
    served       what each layer computes, decided on an empty model as transformers would build it
    model        hands every attention layer its part
    fold         methods that fold into query and key, around vLLM's own attention
    backend      all others, over vLLM's pages
"""

from __future__ import annotations


def register() -> None:
    """Called by vLLM, in every process and possibly again."""
    from .resolution import install  # it imports vLLM

    install()
