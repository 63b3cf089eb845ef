"""The door to Transformers: each fact that it does not promise is one function, tested by tests/integration/test_internals.py.

`patches.py` beside it names the functions of Transformers that are wrapped. Other modules use names without an
underscore. A test that fails here on a new release says which function to write anew. Facts of torch's modules, accelerate,
DeepSpeed and bitsandbytes stand below.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch._guards import TracingContext
from transformers import PreTrainedModel, modeling_utils
from transformers.masking_utils import and_masks, causal_mask_function
from transformers.models.auto import auto_factory, modeling_auto

# configs ------------------------------------------------------------------------------------------------------------------

#: The entry of a config that holds the name of its attention; the property beside it switches nested configs too.
IMPLEMENTATION = "_attn_implementation_internal"


def get_implementation(config: Any) -> str | None:
    """Return the name of the attention that a config runs; None: none was chosen yet."""
    name: str | None = getattr(config, IMPLEMENTATION, None)
    return name


def set_implementation(config: Any, name: str | None) -> None:
    """Let one config run an attention; configs nested in it keep theirs."""
    setattr(config, IMPLEMENTATION, name)


def commit_of(config: Any) -> str:
    """Return the revision on the Hub that a config was read from."""
    return getattr(config, "_commit_hash", None) or "main"


# auto classes -------------------------------------------------------------------------------------------------------------


def auto_classes() -> list[Any]:
    """Return the auto classes that have models, but for `AutoModelForPreTraining`, which has all kinds."""
    base: Any = auto_factory._BaseAutoModelClass
    kinds: list[Any] = [x for x in vars(modeling_auto).values() if isinstance(x, type) and issubclass(x, base)]
    return [x for x in kinds if x._model_mapping is not None and x is not modeling_auto.AutoModelForPreTraining]


def names_by_type(auto: Any) -> Mapping[str, Any]:
    """Return an auto class's table from model types to names of classes: one, or several."""
    table: Mapping[str, Any] = auto._model_mapping._model_mapping
    return table


def classes_for(auto: Any, config: Any) -> tuple[type[PreTrainedModel], ...]:
    """Return the classes that an auto class has for a config."""
    if type(config) not in auto._model_mapping:
        return ()
    found = auto._model_mapping[type(config)]
    return found if isinstance(found, tuple) else (found,)


def adapter_classes(peft_class: Any) -> list[tuple[str, Any]]:
    """Return PEFT's auto classes for one of its classes: names, each with the auto class of Transformers that it calls."""
    from peft import auto

    kinds = [x for x in vars(auto).values() if getattr(x, "_target_peft_class", None) is peft_class]
    return [(x.__name__, x._target_class) for x in kinds if peft_class is not None]


# attention modules and masks ----------------------------------------------------------------------------------------------


def _code(module: nn.Module) -> Any:
    forward = inspect.unwrap(type(module).forward)
    # the classes that Unsloth writes anew hand over to a compiled function of such a name
    compiled = getattr(forward, "__globals__", {}).get(f"{type(module).__name__}_forward")
    return getattr(forward if compiled is None else inspect.unwrap(compiled), "__code__", None)


def uses_interface(module: nn.Module) -> bool:
    """Tell whether a module calls the attention interface: its forward function names `ALL_ATTENTION_FUNCTIONS`."""
    return hasattr(module, "config") and "ALL_ATTENTION_FUNCTIONS" in getattr(_code(module), "co_names", ())


#: Whose functions stand around a module's forward, and call it.
_WRAPPERS = {"transformers", "torch", "accelerate"}


def foreign_forward(module: nn.Module) -> str | None:
    """Return the function of another package that runs in place of the forward of a module or its class; None: none."""
    home = next(c for c in type(module).__mro__ if "forward" in vars(c))
    forward = vars(module).get("forward", vars(home)["forward"])
    while forward is not None:
        function = getattr(forward, "__func__", forward)
        where = getattr(function, "__globals__", {}).get("__name__", "")  # its __module__ may be copied from what it wraps
        if where and where != home.__module__ and where.partition(".")[0] not in _WRAPPERS:
            return f"{where}.{function.__code__.co_qualname}"
        forward = getattr(forward, "__wrapped__", None)
    return None


def attends_in_place(module: nn.Module) -> bool:
    """Tell whether a module stands around one that attends, and computes its attention (TransformerLens' AttentionBridge)."""
    return any(c.__name__ == "AttentionBridge" and c.__module__.startswith("transformer_lens.") for c in type(module).__mro__)


def passes_on(module: nn.Module, argument: str) -> bool:
    """Tell whether a module's forward function calls something with an argument of this name."""
    return any(argument == c or (isinstance(c, tuple) and argument in c) for c in _code(module).co_consts)


def has_local(module: nn.Module, name: str) -> bool:
    """Tell whether a module's forward function has an argument or a variable of this name."""
    return name in _code(module).co_varnames


@dataclass(frozen=True)
class MaskInterval:
    """A mask function that shows every row one interval of keys: causal, with a window and packing if given.

    Of distances and sequences alone: in packed text it is asked at positions that begin anew with each sequence.
    """

    window: int | None = None
    sequence_ids: Tensor | None = None


def interval_of(mask_function: Callable[..., Any]) -> MaskInterval | None:
    """Return the interval that one of Transformers' mask functions shows; None: the function is not known.

    Mask functions have no attributes: names and closures say what they show. An unknown one costs memory, never exactness.
    """
    if mask_function is causal_mask_function:
        return MaskInterval()
    if not hasattr(mask_function, "__code__"):
        return None  # a partial, or a callable object
    name = mask_function.__qualname__.removesuffix(".<locals>.inner_mask")
    cells = dict(zip(mask_function.__code__.co_freevars, mask_function.__closure__ or (), strict=True))
    if mask_function.__qualname__ == f"{and_masks.__qualname__}.<locals>.and_mask":
        parts = [interval_of(f) for f in cells["mask_functions"].cell_contents]
        windows = {p.window for p in parts if p is not None and p.window is not None}
        ids = [p.sequence_ids for p in parts if p is not None and p.sequence_ids is not None]
        if None in parts or len(windows) > 1 or len(ids) > 1:
            return None
        return MaskInterval(window=next(iter(windows), None), sequence_ids=ids[0] if ids else None)
    if name == "sliding_window_overlay":
        return MaskInterval(window=int(cells["sliding_window"].cell_contents))
    if name == "packed_sequence_mask_function":
        return MaskInterval(sequence_ids=cells["packed_sequence_mask"].cell_contents)
    if name == "remap_positions_for_packed_sequence":  # inside one document positions differ as cache indices do
        return interval_of(cells["mask_function"].cell_contents)
    return None


def documents_in(mask_function: Callable[..., Any]) -> tuple[Tensor | None, bool]:
    """Look for packed documents in a mask function and in those that it is made of.

    Returns:
        the numbers by which documents are told apart, (batch, length); None: none were found.
        whether all these functions are Transformers'; in others documents may be told apart unseen.
    """
    interval = interval_of(mask_function)
    ids, known = None if interval is None else interval.sequence_ids, is_of_transformers(mask_function)
    for cell in getattr(mask_function, "__closure__", None) or ():
        for part in cell.cell_contents if isinstance(cell.cell_contents, tuple) else (cell.cell_contents,):
            if callable(part):
                own, of_transformers = documents_in(part)
                ids, known = own if ids is None else ids, known and of_transformers
    return ids, known


def is_of_transformers(function: Any) -> bool:
    """Tell whether a function is defined by Transformers."""
    return str(getattr(function, "__module__", "")).startswith("transformers.")


# building and loading -----------------------------------------------------------------------------------------------------


def input_embeddings(model: Any) -> nn.Module | None:
    """Return the module that embeds a model's tokens; None: its class names none."""
    try:
        found: nn.Module | None = model.get_input_embeddings()
    except NotImplementedError:
        return None
    return found


def is_initialised(x: Any) -> bool:
    """Tell whether Transformers has given a module or a parameter its values, from a checkpoint or by its own rule."""
    return bool(getattr(x, "_is_hf_initialized", False))


def frame_above(levels: int) -> FrameType | None:
    """Return the frame that many calls above the caller's."""
    try:
        return sys._getframe(levels + 1)
    except ValueError:  # there are fewer
        return None


def is_running(frame: FrameType) -> bool:
    """Tell whether a frame still executes, in whichever thread; one that has ended loses its variables."""
    try:
        frame.clear()  # Python refuses it for a frame that executes
    except RuntimeError:
        return True
    return False


def is_part(model: PreTrainedModel) -> bool:
    """Tell whether another model is being built around this one: its `__init__` is running and called this one's."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__init__" and code.co_argcount:
            builds = frame.f_locals.get(code.co_varnames[0])
            if builds is not model and isinstance(builds, PreTrainedModel):
                return True
        frame = frame.f_back
    return False


def is_passed_over(kind: Any, key: str) -> bool:
    """Tell whether a class drops a weight of this name from a checkpoint, and says nothing."""
    return any(re.search(pattern, key) for pattern in kind._keys_to_ignore_on_load_unexpected or ())


@contextmanager
def load_reports() -> Iterator[list[str]]:
    """Collect the tables of weights that did not load, which Transformers would log; also where it is to log errors alone."""
    found: list[str] = []
    logger = logging.getLogger(modeling_utils.__name__)
    own, shown = logger.level, logger.getEffectiveLevel()

    def keep(record: logging.LogRecord) -> bool:
        if ours := "LOAD REPORT" in record.getMessage():
            found.append(record.getMessage())
        return not ours and record.levelno >= shown

    logger.addFilter(keep)
    if shown > logging.WARNING:  # where it has a level of its own, transformers complains of layers that it did not shard
        logger.setLevel(logging.WARNING)
    try:
        yield found
    finally:
        logger.setLevel(own)
        logger.removeFilter(keep)


# torch, accelerate, DeepSpeed ---------------------------------------------------------------------------------------------

#: The entries of a torch module that hold its hooks.
HOOKS: tuple[str, ...] = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
HOOKS += ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the table of a module's children, which changes with the module."""
    return module._modules


def modules_of(module: nn.Module) -> list[nn.Module]:
    """A module and all in it, in the order of `Module.modules`, which takes ten times as long."""
    found: dict[nn.Module, None] = {}
    open_ones: list[nn.Module | None] = [module]
    while open_ones:
        one = open_ones.pop()
        if one is not None and one not in found:
            found[one] = None
            open_ones += reversed(one._modules.values())
    return list(found)


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the table of a module's buffers, which changes with the module."""
    return module._buffers


def is_compiled(module: nn.Module) -> bool:
    """Tell whether a module was compiled in place, by `module.compile()`."""
    return module._compiled_call_impl is not None


#: The context of the graph that Dynamo makes, or None. Meanwhile torch 2.11 runs a config's properties itself, and knows no
#: kind of str but str.
tracing_context = TracingContext.try_get


def is_replica(module: nn.Module) -> bool:
    """Tell whether `nn.DataParallel` made a module, for one step."""
    return hasattr(module, "_is_replica")


def storage_of(x: Tensor) -> int:
    """Return the identity of a tensor's memory, by which two views of one can be told."""
    identity: int = x.untyped_storage()._cdata
    return identity


def placing_hooks(module: nn.Module) -> list[Any]:
    """Return accelerate's hooks of one module that place its parameters."""
    hook = vars(module).get("_hf_hook")
    return [x for x in getattr(hook, "hooks", (hook,)) if hasattr(x, "execution_device")]


def has_hook(module: nn.Module) -> bool:
    """Tell whether accelerate has put a hook around a module."""
    return "_hf_hook" in vars(module)


def deepspeed_group() -> Any:
    """Return the processes among which DeepSpeed splits sequences, or None."""
    state = sys.modules.get("deepspeed.runtime.sequence_parallel.parallel_state_sp")
    return None if state is None else state._SEQUENCE_PARALLEL_GROUP


def packs_when_evaluated(module: nn.Module) -> bool:
    """Tell whether evaluating a module changes its weights for good: bitsandbytes packs those of 4 bit for some CPUs.

    Packed weights pass zeros on as gradients, and `state_dict`, which PEFT calls, unpacks them to others.
    """
    return bool(vars(module).get("support_avx512bf16_for_cpu"))
