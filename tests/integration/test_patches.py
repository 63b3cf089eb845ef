"""The places where we hold on to transformers' insides: if one moves, this file says which, before anything else fails."""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import CASES, DEFAULT, model_config
from helpers import python, stock, tokens
from torch.nn.attention.flex_attention import create_block_mask
from transformers import (
    CONFIG_MAPPING,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    Cache,
    LlamaForCausalLM,
    PreTrainedConfig,
    Qwen2_5OmniConfig,
    SiglipVisionConfig,
    SiglipVisionModel,
    masking_utils,
)
from transformers.loss import loss_utils
from transformers.loss.loss_utils import LOSS_MAPPING

import hf_longattn
from hf_longattn.integration import arguments, masks, patch, patches, state
from hf_longattn.integration.caches import CACHE
from hf_longattn.integration.engines import paged
from hf_longattn.sharing import adapters

TOWER: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
ROOT = Path(__file__).parents[2]
DECLARED = (*patches.PATCHES, *paged.PATCHES, *adapters.PATCHES)
HERE = tuple(x for x in DECLARED if not str(x.owner).startswith("trl.") or importlib.util.find_spec("trl"))
#: What the wrapped functions must be given, by our wrappers' knowledge.
REQUIRED = {
    "PreTrainedConfig.to_dict": ["self"],
    "PreTrainedConfig.from_dict": ["cls", "config_dict"],
    "PreTrainedModel.from_pretrained": ["cls", "pretrained_model_name_or_path"],
    "PreTrainedModel._from_config": ["cls", "config"],
    "PreTrainedModel._initialize_weights": ["self", "module"],
    "PreTrainedModel.post_init": ["self"],
    "PreTrainedModel.set_attn_implementation": ["self", "attn_implementation"],
    "ContinuousBatchingManager.__init__": ["self", "model", "generation_config", "continuous_batching_config"],
    "Trainer.train": ["self"],
    "ContinuousBatchingManager.switch_to_cb_friendly_attn": ["self", "model"],
}
WRAPPED = {str(x): x for x in HERE if not x.factory}


def owner_of(declared: patch.Patch) -> Any:
    if not isinstance(declared.owner, str):
        return declared.owner
    module, _, name = declared.owner.partition(":")
    return getattr(importlib.import_module(module), name) if name else importlib.import_module(module)


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_methods_have_the_signature_we_know(name: str) -> None:
    wrapped = inspect.unwrap(getattr(owner_of(WRAPPED[name]), WRAPPED[name].name), stop=lambda f: hasattr(f, "__wrapped__"))
    original = wrapped.__wrapped__
    assert not hasattr(original, "__wrapped__") or name not in REQUIRED  # wrapped once
    assert wrapped.__doc__ == original.__doc__
    required = [
        p.name for p in inspect.signature(original).parameters.values() if p.default is p.empty and p.kind < p.VAR_POSITIONAL
    ]
    assert required == REQUIRED.get(name, required)


def test_the_property_of_the_implementation_is_the_one_we_know() -> None:
    name = PreTrainedConfig._attn_implementation
    assert name.fget.__qualname__ == "PreTrainedConfig._attn_implementation"
    config = PreTrainedConfig(attn_implementation="eager")
    assert config.__dict__["_attn_implementation_internal"] == "eager"
    config._attn_implementation = None
    assert config._attn_implementation is None


def test_arguments_of_the_loss_are_known() -> None:
    """What a causal language model's loss takes travels through attention by kwargs."""
    made_by_the_model = {"logits", "labels", "vocab_size", "kwargs"}
    for loss in (LOSS_MAPPING["ForCausalLM"], loss_utils.fixed_cross_entropy):
        taken = inspect.signature(loss).parameters.keys() - made_by_the_model - {"source", "target"}
        assert taken <= arguments.HARMLESS


def test_installing_again_wraps_nothing_twice() -> None:
    before = [inspect.getattr_static(owner_of(x), x.name) for x in HERE]
    patch.install(*HERE)
    assert [inspect.getattr_static(owner_of(x), x.name) for x in HERE] == before


@pytest.mark.slow
def test_importing_it_anew_is_refused() -> None:
    """A second copy would not know the models of the first."""
    result = python(
        """
        import sys, hf_longattn, transformers
        for name in [name for name in sys.modules if name.partition(".")[0] == "hf_longattn"]:
            del sys.modules[name]
        try:
            import hf_longattn
        except ImportError as error:
            print("refused:", error)
        """
    )
    assert "refused: hf_longattn was imported already" in result.stdout, result.stderr


@pytest.mark.slow
def test_importing_it_changes_nothing_for_models_without_a_method() -> None:
    """Compared in one process before and after, on a model that was there before and on one that was not."""
    result = python(
        """
        import copy, inspect, io, pickle, sys, tempfile, warnings
        warnings.simplefilter("ignore")
        import torch
        from torch.nn.parallel.replicate import replicate
        from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
        import peft, transformers.trainer, transformers.generation.continuous_batching

        sizes = dict(vocab_size=97, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1)
        ids = torch.arange(1, 13)[None]
        torch.nn.parallel.replicate.__globals__["_broadcast_coalesced_reshape"] = (
            lambda tensors, devices, detach=False: [[t.view_as(t) for t in tensors] for _ in devices]  # of one device, the CPU
        )

        def new():
            torch.manual_seed(0)
            return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2)).eval()

        class Ids(torch.nn.Module):
            def __init__(self, model):
                super().__init__()
                self.model = model

            def forward(self, ids):
                return self.model(ids, use_cache=False).logits

        def saved(m):
            file = io.BytesIO()
            torch.save(m, file)
            file.seek(0)
            return torch.load(file, weights_only=False)

        def exported(m):
            return torch.export.export(Ids(m), (ids,), strict=False).module()(ids)

        def trained(m):
            with tempfile.TemporaryDirectory() as folder:
                rows = [{"input_ids": ids[0], "labels": ids[0]}] * 2
                options = TrainingArguments(folder, max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True)
                Trainer(copy.deepcopy(m), options, train_dataset=rows).train()
                m.save_pretrained(folder)
                return LlamaForCausalLM.from_pretrained(folder)(ids).logits

        def all_of(m):
            replicas = replicate(Ids(m), [0, 0])
            with torch.no_grad():
                ways = {
                    "itself": m(ids).logits,
                    "copy": copy.deepcopy(m)(ids).logits,
                    "pickle": pickle.loads(pickle.dumps(m))(ids).logits,
                    "torch.save": saved(m)(ids).logits,
                    "replicate": torch.cat([r(ids) for r in replicas]),
                    "functional_call": torch.func.functional_call(m, dict(m.named_parameters()), (ids,)).logits,
                    "jit.trace": torch.jit.trace(Ids(m), (ids,), check_trace=False)(ids),
                    "export": exported(m),
                }
            ways["Trainer"] = trained(m)
            return ways

        def state(m):
            kept = repr(m.config), repr(vars(m.config)), m.config.to_dict()
            return *kept, [[*vars(x), *map(repr, vars(x)["_forward_pre_hooks"])] for x in m.modules()]

        def members():
            owners = [c for base in (torch.nn.Module, transformers.PreTrainedConfig, transformers.Cache) for c in below(base)]
            owners += [Trainer, peft.PeftModel, peft.config.PeftConfigMixin]
            for owner in dict.fromkeys(owners):
                for name, member in vars(owner).items():
                    if callable(getattr(owner, name, None)) and not name.startswith("__"):
                        assert "longattn" not in name
                    if callable(member) or isinstance(member, (classmethod, staticmethod, property)):
                        found = getattr(owner, name, None)
                        shown = (found.__module__, found.__qualname__, found.__doc__) if inspect.isroutine(found) else None
                        written = inspect.isfunction(found) or inspect.ismethod(found)
                        yield (owner, name), (type(member), shown, str(inspect.signature(found)) if written else "")

        def below(base):
            yield base
            for sub in base.__subclasses__():
                yield from below(sub)

        there, begins = new(), state(new())
        before, classes = all_of(there), dict(members())
        used = state(there)
        inits = {c: c.__init__ for c in below(transformers.PreTrainedModel)}
        import hf_longattn
        for m, then in ((there, used), (new(), begins)):
            for known, found in zip(then, state(m), strict=True):
                assert known == found
            after = all_of(m)
            for way, logits in before.items():
                assert torch.equal(logits, after[way]), way
        now = dict(members())
        assert {key: x for key, x in now.items() if key in classes} == classes
        theirs = ((o, n) for o, n in now.keys() - classes.keys() if o.__module__.startswith(("peft", "transformers")))
        assert {(o.__name__, n) for o, n in theirs} == {("PreTrainedConfig", "longattn"), ("PreTrainedModel", "load_adapter")}
        assert all(c.__init__ is init for c, init in inits.items())
        for patch in (*hf_longattn.integration.patches.PATCHES, *hf_longattn.sharing.adapters.PATCHES):
            owner = patch.owner
            if isinstance(owner, str):
                module, _, name = owner.partition(":")
                if module not in sys.modules:  # TRL
                    continue
                owner = getattr(sys.modules[module], name)
            if not patch.factory:
                function = getattr(owner, patch.name)
                assert pickle.loads(pickle.dumps(function)) == function, patch
        print("the same")
        """
    )
    assert "the same" in result.stdout, result.stderr


def foreign_names(tree: ast.AST) -> set[str]:
    """What a file imports from elsewhere."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    imports += [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    return {alias.asname or alias.name.partition(".")[0] for node in imports for alias in node.names}


def test_a_function_that_a_release_lacks_is_an_error_unless_it_is_optional() -> None:
    lost = patch.Patch(Cache, "no_such_function", lambda original: original, "positions would be lost")
    with pytest.raises(ImportError, match=r"transformers \S+ has no Cache\.no_such_function, without .* positions would be"):
        patch.install(lost)
    patch.install(lost._replace(name="none_either", optional=True))


@pytest.mark.slow
def test_nothing_else_is_patched() -> None:
    """Only `patch` assigns to classes and modules of other packages, and only what is declared."""
    declared = 0
    for path in (ROOT / "hf_longattn").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        foreign = foreign_names(tree)
        for node in ast.walk(tree):
            targets = (
                node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
            )
            for target in (t for t in targets if isinstance(t, ast.Attribute)):
                hook = ast.unparse(target) == "warnings.formatwarning"  # which Python lets programs assign
                own = hook or not (isinstance(target.value, ast.Name) and target.value.id in foreign)
                assert own, f"{path}:{node.lineno}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                first = node.args[0] if node.args else None
                own = path.name == "patch.py" or not (isinstance(first, ast.Name) and first.id in foreign)
                assert node.func.id != "setattr" or own, f"{path}:{node.lineno}"
                declared += node.func.id == "Patch" and path.parent.name != "vllm"
    assert declared == len(DECLARED)


def test_the_page_lists_every_patch() -> None:
    page = (ROOT / "docs" / "explain" / "design.md").read_text(encoding="utf-8")
    rows = [f"| `{x}` | {x.why} |" for x in DECLARED]
    served = (ROOT / "hf_longattn/integration/engines/vllm/resolution.py").read_text(encoding="utf-8")
    found = re.findall(r'Patch\(\s*(?:type\()?(\w+)\)?,\s*"(\w+)",\s*\w+,\s*"(.+?)",?\s*\)', served)
    rows += [f"| vLLM's `{owner}.{name}` | {why} |" for owner, name, why in found]
    assert len(found) == served.count("Patch(")
    assert "\n".join(rows) in page


@pytest.mark.filterwarnings("ignore")
def test_a_part_is_known_whatever_its_owner_calls_itself() -> None:
    """A tower has nothing to put a method into, and built alone would be refused."""

    class Owner(LlamaForCausalLM):
        def __init__(model, config: Any) -> None:
            super().__init__(config)
            model.tower = SiglipVisionModel(SiglipVisionConfig(**TOWER, attn_implementation="alibi"))
            model.post_init()

    config = model_config("llama")
    config._attn_implementation = "alibi"
    assert hf_longattn.get_config(Owner(config)).name == "alibi"
    with pytest.raises(ValueError, match="0 layers"):
        SiglipVisionModel(SiglipVisionConfig(**TOWER, attn_implementation="alibi"))
    assert list(inspect.signature(LlamaForCausalLM).parameters) == ["config"]


def test_warnings_point_at_the_line_of_the_user(tmp_path: Path) -> None:
    stock("llama").save_pretrained(tmp_path)
    loaded = functools.partial(AutoModelForCausalLM.from_pretrained, tmp_path)
    ways: list[Callable[[], Any]] = [
        lambda: loaded(attn_implementation="scale_invariant"),
        lambda: LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="scale_invariant"),
        lambda: hf_longattn.apply(loaded(), "scale_invariant"),
        lambda: loaded().set_attn_implementation("scale_invariant"),
        lambda: hf_longattn.update(loaded(attn_implementation="alibi"), logit_map={"name": "scale_invariant"}),
    ]
    for number, way in enumerate(ways):
        with pytest.warns(UserWarning) as told:  # noqa: PT030
            way()
        assert {x.filename for x in told if "hf_longattn" in str(x.message)} == {__file__}, number


@pytest.mark.slow
def test_foreign_configs_are_untouched() -> None:
    """Every config class that transformers has writes with us what it wrote without us, and takes a section."""
    checked = 0
    for config_class in sorted(set(CONFIG_MAPPING.values()), key=lambda c: c.__name__):
        try:
            config = config_class()
        except Exception:  # some cannot be made without arguments, or need a package
            continue
        assert config.longattn is None
        assert not {"longattn", "_longattn", "attn_implementation"} & config.to_dict().keys()
        config.longattn = {"tau": 1.0}
        config.longattn = None
        checked += 1
    assert checked > 400


def test_nested_composite_configs_keep_the_method() -> None:
    """A language model two levels down (Qwen Omni): its name is written at the top, as a dict of dicts."""
    config = Qwen2_5OmniConfig()
    config.longattn = {"tau": 2.0}
    text = config.get_text_config()
    text._attn_implementation = DEFAULT
    assert text.longattn == {"tau": 2.0}
    saved = config.to_dict()
    assert saved["attn_implementation"] == {"thinker_config": {"text_config": "hf_longattn.scale_invariant"}}
    assert saved["longattn"] == {"tau": 2.0}
    again = Qwen2_5OmniConfig.from_dict(saved)
    assert again.get_text_config()._attn_implementation == "hf_longattn.scale_invariant"
    assert again.get_text_config().longattn == {"tau": 2.0}


def test_mask_function_is_called_with_arguments_we_know(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    @functools.wraps(masks.layout_mask)  # else it counts as another package's
    def spy(**kwargs: Any) -> Any:
        calls.append(kwargs)
        return masks.layout_mask(**kwargs)

    monkeypatch.setitem(AttentionMaskInterface._global_mapping, DEFAULT, spy)
    m = hf_longattn.apply(stock("gemma3"), CASES[DEFAULT])
    m(torch.ones(1, 12, dtype=torch.long), use_cache=False)
    full, sliding = ({k: v for k, v in c.items() if v is not None} for c in sorted(calls, key=lambda c: "local_size" in c))
    known = {"batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "mask_function", "config", "device", "dtype"}
    assert known <= full.keys()
    assert full.keys() - known <= {"use_vmap", "allow_is_causal_skip", "attention_mask"}
    assert sliding.keys() - full.keys() == {"local_size"}
    assert "allow_is_bidirectional_skip" not in full  # by this word we know a bidirectional mask
    assert "allow_is_bidirectional_skip" in inspect.signature(masking_utils.create_bidirectional_mask).parameters or (
        "allow_is_bidirectional_skip" in inspect.getsource(masking_utils.create_bidirectional_mask)
    )


def pack(function: Any, positions: torch.Tensor, ids: torch.Tensor) -> Any:
    """What create_causal_mask does to a mask function when it finds packed sequences."""
    if hasattr(masking_utils, "packed_sequence_compatibility_function"):
        return masking_utils.packed_sequence_compatibility_function(function, positions, ids)
    return masking_utils.and_masks(function, masking_utils.packed_sequence_mask_function(ids))


def test_mask_functions_are_recognised() -> None:
    """The names and closures of masking_utils, one by one and combined."""
    ids = torch.tensor([[0, 0, 1]])
    positions = torch.tensor([[0, 1, 0]])
    causal = masking_utils.causal_mask_function
    assert masks.recognise(causal) == masks.MaskInterval()
    assert masks.recognise(masking_utils.sliding_window_causal_mask_function(7)) == masks.MaskInterval(window=7)
    packed = masks.recognise(pack(causal, positions, ids))
    assert packed is not None
    assert packed.sequence_ids is ids
    both = masks.recognise(pack(masking_utils.sliding_window_causal_mask_function(7), positions, ids))
    assert both is not None
    assert (both.window, both.sequence_ids is ids) == (7, True)


def test_other_mask_functions_are_not_taken_for_intervals() -> None:
    causal, window = masking_utils.causal_mask_function, masking_utils.sliding_window_causal_mask_function
    others = [
        masking_utils.bidirectional_mask_function,
        masking_utils.or_masks(causal, masking_utils.sliding_window_overlay(3)),
        masking_utils.and_masks(causal, lambda *_: True),
        masking_utils.and_masks(window(3), window(5)),
        masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long)),
        masking_utils.padding_mask_function(torch.ones(1, 3, dtype=torch.bool)),
        masking_utils.blockwise_overlay(torch.zeros(1, 3, dtype=torch.long)),
    ]
    for function in others:
        assert masks.recognise(function) is None


def test_mask_functions_that_are_no_functions_are_as_exact() -> None:
    """A partial, which sdpa takes, has no name and no closure."""
    assert masks.recognise(functools.partial(masking_utils.causal_mask_function)) is None
    m = hf_longattn.apply(stock("llama"), "rerope", window=7)
    known: dict[str, Any] = {"attention_mask": None, CACHE: None, "position_ids": torch.arange(24)[None]}
    known |= {"config": m.config, "inputs_embeds": torch.zeros(2, 24, 32)}

    def later(first: int, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return key >= first

    made = [
        masking_utils.create_causal_mask(**known, and_mask_function=f)
        for f in (functools.partial(later, 3), lambda *place: later(3, *place))
    ]
    assert torch.equal(*made)


def test_a_mask_of_another_attention_is_refused() -> None:
    mask = create_block_mask(lambda b, h, q, k: q >= k, 2, None, 24, 24, device="cpu")
    for layers in ("full_attention", [1]):
        with pytest.raises(TypeError, match="the attention mask is a BlockMask, which another attention reads: pass a 2-D"):
            hf_longattn.apply(stock("llama"), "rerope", window=7, layers=layers)(tokens(), attention_mask=mask)


def test_layers_point_downwards_only() -> None:
    program = shutil.which("lint-imports", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("import-linter is not installed here")
    result = subprocess.run([program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    assert "0 broken" in result.stdout


@pytest.mark.parametrize("name", hf_longattn.__all__)
def test_public_names_are_documented(name: str) -> None:
    thing = getattr(hf_longattn, name)
    assert inspect.getdoc(thing)
    if inspect.isclass(thing):
        for attribute, member in vars(thing).items():
            if inspect.isfunction(member) and not attribute.startswith("_"):
                assert inspect.getdoc(member) or attribute in ("from_dict",), f"{name}.{attribute}"


@pytest.mark.parametrize("name", hf_longattn.methods.__all__)
def test_methods_are_documented(name: str) -> None:
    method = getattr(hf_longattn.methods, name)
    assert inspect.getdoc(method) != inspect.getdoc(method.__mro__[1])
    assert method.paper


def test_what_a_model_carries_is_listed_where_its_owner_says_so() -> None:
    """Every name that we give to an entry of somebody else's object, in `state` and nowhere else."""
    found: set[str] = set()
    for path in (ROOT / "hf_longattn" / "integration").rglob("*.py"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if "ContextVar(" not in line:
                found |= set(re.findall(r"""["'.](_?longattn_\w+)""", line))
    assert found == set(re.findall(r"_?longattn_\w+", state.__doc__ or ""))
