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

#: Releases of vLLM in which every method was compared with Transformers.
TESTED = ("0.32", "0.33")


def register() -> None:
    """Called by vLLM, in every process and possibly again.

    Raises:
        ImportError: this vLLM has not all that the plugin needs, and would serve checkpoints without their methods.
    """
    try:
        from .resolution import install  # it imports vLLM

        install()
    except (ImportError, AttributeError, KeyError) as error:
        raise ImportError(unfit(f"it lacks what the plugin needs ({error})")) from error


def unfit(difference: str) -> str:
    """Say by what a method would be lost in this vLLM, and the way out."""
    from vllm import __version__

    return (
        f"hf_longattn was tested with vLLM {' and '.join(TESTED)}, and in vLLM {__version__} {difference}: install a tested "
        f'release (pip install "vllm=={TESTED[-1]}.*"), or serve only models without a method, with VLLM_PLUGINS=""'
    )
