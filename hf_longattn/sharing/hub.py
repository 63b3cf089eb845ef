"""Saving a model or an adapter with a card, and putting it on the Hub."""

from __future__ import annotations

import inspect
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import CommitOperationAdd, HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError
from torch import nn
from transformers import PreTrainedModel

from ..checks import Refused, check_tokenizer
from ..config import TRIPWIRE
from ..evaluation.checkpoints import Checkpoint, carry, load_tokenizer
from ..evaluation.loading import load_setting
from ..evaluation.settings import Setting
from ..files import ADAPTER_FILE, METRICS_FILE, RECIPE_FILE, written_aside
from ..integration import describe, get_config
from ..integration.classes import loaders
from ..integration.offload import refuse_to_save
from ..integration.saved_method import saved_in
from ..slots.registry import did_you_mean
from ..user_warnings import warn
from .card import TAG, Facts, contents, hub_id, is_repo_name, link, model_card, source

README, STUB = "README.md", "modeling_longattn.py"
#: What is uploaded: weights as safetensors and text. Optimizer states and other pickles stay where they are.
SUFFIXES = {".safetensors", ".json", ".md", ".txt", ".model", ".jinja", ".py", ".png"}
#: What stays behind though it is text: what training writes down of itself, paths of this machine among it.
LOGS = {"trainer_state.json", METRICS_FILE}
#: What a README of PEFT's says.
TEMPLATE = "[More Information Needed]"
#: Where a card of ours says what to load.
LOADING = re.compile(r'(^model = \w+\.from_pretrained\()"[^"]*"(?=[,)])', re.MULTILINE)
#: Where it names the base, if it does.
OF_BASE = re.compile(r"^(A model|An adapter \([^)]*\))( of (\[[^]]*\]|`[^`]*` )\([^)]*\))?(?= whose attention)", re.MULTILINE)
#: A picture beside a card, which stays in its folder.
PICTURE = re.compile(r"^!\[.*\]\(.*\)$", re.MULTILINE)
_STALE = ("*.safetensors", "*.safetensors.index.json", "config.json", ADAPTER_FILE, STUB)


def save(
    model: nn.Module,
    directory: str | Path,
    *,
    tokenizer: Any = None,
    name: str | None = None,
    base_model: str | None = None,
    remote_code: bool = False,
    strict: bool = False,
    overwrite: bool = False,
    state_dict: Mapping[str, Any] | None = None,
    **card: Any,
) -> Path:
    """Save a model (or, of a model with an adapter, the adapter) with its attention and a model card.

    Args:
        model: a transformers model that runs a method, or a PEFT model around one.
        directory: where to; must not hold anything yet.
        tokenizer: saved along, if given.
        name: what the card calls the model; default the directory's name.
        base_model: the Hub's name of the model that this was made from; default what the model was loaded from.
        remote_code: add the small file that makes loading with trust_remote_code=True import this package.
        strict: name the model's class LongAttn... in its config, so that engines which choose their own code by that name, and
            never read what attention it needs (vLLM, SGLang), refuse it. transformers with this package loads it as usual.
        state_dict: the weights, where the model's own are sharded (torch's get_model_state_dict gathers them).
        overwrite: into a directory that holds something: weights, configs and a card of ours are replaced, all else stays.
        card: training_lengths, metrics, base_metrics, evaluated_on, reach, license; see `hf_longattn.sharing.card.Facts`.

    Returns:
        The directory.

    Raises:
        ValueError: the model runs no method, several adapters are active that PEFT does not wrap, or base_model is a path.
        TypeError: the tokenizer is not a loaded one.
        FileExistsError: the directory is not empty, without overwrite; or it is a file.
    """
    get_config(model)  # raises if there is none
    if tokenizer is not None:
        check_tokenizer(tokenizer)
    directory, facts = Path(directory), _facts(card, save)
    _check_name(base_model)
    adapter = bool(getattr(model, "peft_config", None))
    if (remote_code or strict) and adapter:
        raise ValueError(f"{'remote_code' if remote_code else 'strict'} works for whole models only: merge_and_unload() first")
    refuse_to_save(model)
    stub = _stub(model) if remote_code else None
    if directory.exists() and not directory.is_dir():
        raise FileExistsError(f"{directory} is a file: give a folder, which is made if there is none")
    if directory.exists() and any(directory.iterdir()) and not overwrite:
        raise FileExistsError(f"{directory} is not empty; pass overwrite=True to replace the model in it")
    readme = directory / README
    theirs = readme.read_text(encoding="utf-8") if readme.exists() else TEMPLATE
    with written_aside(directory, _STALE) as aside:
        if adapter and isinstance(model, PreTrainedModel):
            _save_injected(model, aside, state_dict)
        else:
            given = {} if state_dict is None else {"state_dict": state_dict}
            model.save_pretrained(aside, **given)  # type: ignore[operator]
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)
        for file in aside.rglob(ADAPTER_FILE) if base_model else ():  # of several adapters, each
            _edit(file, base_model_name_or_path=base_model)
        if stub is not None:
            (aside / STUB).write_text(stub[1], encoding="utf-8")
            _edit(aside / "config.json", auto_map=stub[0])
        if strict:
            _edit(aside / "config.json", **_tripwire(json.loads((aside / "config.json").read_text(encoding="utf-8"))))
        if TEMPLATE not in theirs and not _ours(theirs):
            (aside / readme.name).unlink(missing_ok=True)  # PEFT's
            warn(f"{readme} was not written by hf_longattn and is kept: no model card is written")
            return directory
        write_card(model, aside, name or directory.resolve().name, facts, base_model, remote_code)
    return directory


def _save_injected(model: PreTrainedModel, directory: Path, state_dict: Mapping[str, Any] | None) -> None:
    """Save the active adapter of a transformers model that PEFT does not wrap, in PEFT's format.

    transformers' own `save_pretrained` does this too, where PEFT is as new as that release of transformers wants.

    Raises:
        ValueError: several adapters are active.
    """
    from peft import get_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTunerLayer
    from safetensors.torch import save_file

    active = next((m.active_adapters for m in model.modules() if isinstance(m, BaseTunerLayer)), list(model.peft_config)[:1])
    if len(active) != 1:
        raise ValueError(
            f"{', '.join(active)} are active together; save one at a time: load it alone, or model.set_adapter(...)"
        )
    weights = get_peft_model_state_dict(model, state_dict=state_dict, adapter_name=active[0])
    save_file(
        {f"base_model.model.{key}": value.contiguous() for key, value in weights.items()},
        directory / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    model.peft_config[active[0]].save_pretrained(str(directory))


def write_card(
    model: nn.Module, directory: Path, name: str, facts: Facts, base_model: str | None = None, remote_code: bool = False
) -> None:
    """The README.md of a folder that a model was saved in, in place of what is there."""
    known = describe(model).trained
    base = base_model or getattr(model, "name_or_path", None)
    how: dict[str, Any] = {"remote_code": remote_code, "trained": known and known.length}
    model_card(directory, name, facts, base_model=base, **how).save(directory / README)


def merge(adapter: str | Path, directory: str | Path, **options: Any) -> Path:
    """Save the model that an adapter makes, merged and under the attention that it records: PEFT is not needed then. Its card
    repeats what the adapter's says of training, and of evaluation unless metrics, evaluated_on or reach are given.

    Args:
        adapter: a folder; its base is found by the name that it gives.
        directory: where to, not the adapter's folder; must not hold anything yet, without overwrite=True.
        options: of `save`: base_model, strict, training_lengths, metrics, overwrite, ...

    Returns:
        The directory.

    Raises:
        ValueError: the folder holds no adapter, or one that names no base, or that records no method, whose
            `merge_and_unload` is enough; or the model would be written into it, where the adapter would be lost.
        TypeError: a model is given, not a folder.
        FileExistsError: as `save`.
    """
    if isinstance(adapter, nn.Module):
        raise TypeError(
            f"merge takes the folder of a saved adapter, got a loaded {type(adapter).__name__}: "
            "hf_longattn.save(model.merge_and_unload(), directory) saves that merged"
        )
    folder = Path(adapter)
    if Path(directory).resolve() == folder.resolve():
        raise ValueError(f"{folder} holds the adapter, which the merged model would replace: give another folder")
    if (folder / "config.json").is_file() and not (folder / ADAPTER_FILE).is_file():
        raise ValueError(f"{folder} holds a whole model: there is nothing to merge")
    saved, _ = contents(folder)
    said = _said(folder / README, options)
    if not isinstance(base := saved.get("base_model_name_or_path"), str) or not base:
        raise ValueError(
            f"{folder / ADAPTER_FILE} names no model that the adapter was made from (base_model_name_or_path is {base!r}): "
            "write its name or folder there; or load that model, put the adapter on it (PeftModel.from_pretrained), and "
            "hf_longattn.save(model.merge_and_unload(), directory)"
        )
    checkpoint = Checkpoint(base)
    model = load_setting(Setting("adapter", adapter=str(folder)), checkpoint, checkpoint.dtype)
    there = any(folder.glob("tokenizer*"))
    made: dict[str, Any] = {"tokenizer": load_tokenizer(str(folder) if there else base), "base_model": hub_id(base)}
    save(model, directory, **made | said | options)
    carry(base, Path(directory), type(model))
    return Path(directory)


def _said(readme: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Read in a card of ours the facts of an adapter's training, and of its measurement if nothing is given of that."""
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    if not _ours(text):
        return {}
    with _reading(readme):
        facts = _facts(dict(ModelCard(text).data.get(TAG) or {})).data
    measured = {"metrics", "base_metrics", "evaluated_on", "reach"}
    if given.keys() & measured:
        facts = {name: fact for name, fact in facts.items() if name not in measured}
    if "evaluated_on" in facts:
        facts["evaluated_on"] += ", with the adapter before it was merged"
    if "reach" in facts:
        facts["reach"] = PICTURE.sub("", facts["reach"]).strip()
    return facts


@contextmanager
def _reading(readme: Path) -> Iterator[None]:
    """Raise ValueError that names a card of ours in whose metadata somebody has written what cannot be read."""
    try:
        yield
    except (AttributeError, OSError, TypeError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{readme} cannot be read ({error}): mend its metadata, or take {TAG}: out of it") from error


def push(
    model: nn.Module | str | Path,
    repo_id: str,
    *,
    base_model: str | None = None,
    private: bool | None = None,
    exist_ok: bool = False,
    token: str | None = None,
    endpoint: str | None = None,
    commit_message: str = "Upload with hf_longattn",
    tokenizer: Any = None,
    remote_code: bool = False,
    **card: Any,
) -> str:
    """Upload a model or an adapter to the Hub, with its attention and a card; a model as `save` with strict=True writes it.

    Args:
        model: as for `save`, or a folder that it (or `save_pretrained`, or Trainer) wrote. A folder is not changed; its
            README.md is kept, if it is more than PEFT's template; a card of ours names `repo_id` as what to load, and gets
            license and base_model where given.
        repo_id: "user/name".
        private: who may see a new repository; None for the account's default.
        exist_ok: add a commit to a repository that exists, in place of an error. A README.md there that is not a card of ours
            stays, where a card of ours would replace it.
        token, endpoint: default those of huggingface_hub.
        tokenizer, remote_code, base_model, card: as for `save`.

    Returns:
        The URL of the commit.

    Raises:
        TypeError: the name is no string.
        ValueError: nothing to upload, weights that are not safetensors, or a base model that is not on the Hub, which an
            adapter and a card would name.
        FileExistsError: the repository exists, without exist_ok. Nothing was uploaded.
    """
    if not isinstance(repo_id, str):
        raise TypeError(f'push takes the name of a repository, "user/name", got {repo_id!r}')
    if isinstance(model, nn.Module):
        made: dict[str, Any] = {"tokenizer": tokenizer, "base_model": base_model, "remote_code": remote_code}
        where: dict[str, Any] = {"private": private, "exist_ok": exist_ok, "token": token, "endpoint": endpoint}
        with tempfile.TemporaryDirectory() as folder:
            save(model, folder, name=repo_id, strict=not getattr(model, "peft_config", None), **made, **card)
            return push(folder, repo_id, commit_message=commit_message, **where)
    if tokenizer is not None or remote_code:
        raise ValueError("tokenizer and remote_code belong to a model; a folder has what hf_longattn.save put there")
    if missing := unfinished(Path(model)):
        warn(missing)
    uploaded = files(Path(model), repo_id, _facts(card, push), base_model)
    operations = [CommitOperationAdd(path, content) for path, content in uploaded.items()]
    api = HfApi(endpoint=endpoint, token=token)
    for base in _bases(uploaded):
        if not api.repo_exists(base):
            raise Refused(
                f"the base model is named {base!r}, and the Hub has none of that name (or shows it to others alone): name it "
                'as the Hub does, base_model="user/name" (in a command, --base-model user/name); a whole model\'s README.md '
                "may name none. Nothing was uploaded"
            )
    try:
        api.create_repo(repo_id, private=private, exist_ok=exist_ok)
    except HfHubHTTPError as error:
        if error.response.status_code != 409:
            raise
        raise FileExistsError(
            f"{repo_id} exists already: pass exist_ok=True to add a commit to it, or choose another name"
        ) from error
    if exist_ok and _ours(_text(uploaded[README])) and _has_own_card(api, repo_id):
        warn(f"{repo_id} has a {README} that hf_longattn did not write: it stays, and does not say how the model is loaded")
        operations = [x for x in operations if x.path_in_repo != README]
    return str(api.create_commit(repo_id, operations, commit_message=commit_message).commit_url)


def files(directory: Path, repo_id: str, facts: Facts, base_model: str | None = None) -> dict[str, Path | bytes]:
    """Return the files that `push` uploads, by path in the repository: paths, or the bytes that replace them."""
    _check_name(base_model)
    saved, _ = contents(directory)
    result: dict[str, Path | bytes] = {
        path.relative_to(directory).as_posix(): path
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.suffix in SUFFIXES and path.name not in LOGS and not _aside(path, directory)
    }
    if not any(name.endswith(".safetensors") for name in result):
        raise ValueError(f"{directory} holds no safetensors: save the model with hf_longattn.save or save_pretrained")
    if "peft_type" in saved:
        base = base_model or hub_id(saved.get("base_model_name_or_path"))
        if base is None:
            raise ValueError(
                f"the adapter's base model is {saved.get('base_model_name_or_path')!r}, which nobody else has: name it as the "
                'Hub does, base_model="user/name" (in a command, --base-model user/name)'
            )
        for name in [name for name in result if base_model and Path(name).name == ADAPTER_FILE]:
            result[name] = _json(saved_in(directory / name) | {"base_model_name_or_path": base_model})
    else:
        result["config.json"] = _json(saved | _tripwire(saved))
    readme = directory / README
    if readme.exists() and TEMPLATE not in (text := readme.read_text(encoding="utf-8")):
        fills = {"license": facts.license} if _ours(text) else {}
        if given := sorted(f.name for f in fields(facts) if getattr(facts, f.name) and f.name not in fills):
            raise ValueError(f"{readme} is kept as it is; write {', '.join(given)} into it, or remove it")
        if _ours(text):  # it was written for a folder, from which nobody else can load
            with _reading(readme):
                card = ModelCard(LOADING.sub(rf'\g<1>"{repo_id}"', text, count=1))
            _retitle(card, repo_id.rpartition("/")[2])
            card.data["license"] = facts.license or card.data.get("license")
            if base_model:
                card.data["base_model"] = base_model
                card.text = OF_BASE.sub(rf"\g<1> of {link(base_model)}", card.text, count=1)
            result[README] = str(card).encode()
        return result
    remote_code = "auto_map" in saved
    return result | {
        README: str(model_card(directory, repo_id, facts, base_model=base_model, remote_code=remote_code)).encode()
    }


def _bases(uploaded: Mapping[str, Path | bytes]) -> list[str]:
    """Return the base models that an adapter and a card of ours name; those that its maker wrote by hand are left alone."""
    named = []
    if (config := uploaded.get(ADAPTER_FILE)) is not None:
        named.append(json.loads(_text(config))["base_model_name_or_path"])
    if _ours(text := _text(uploaded[README])):
        named.append(ModelCard(text).data.get("base_model"))
    return list(dict.fromkeys(base for base in named if base))


def _text(content: Path | bytes) -> str:
    return content.decode() if isinstance(content, bytes) else content.read_text(encoding="utf-8")


def _check_name(base_model: str | None) -> None:
    """Raise ValueError for a base model whose name cannot be one on the Hub."""
    if base_model and not is_repo_name(base_model):
        raise ValueError(
            f'base_model={base_model!r} cannot be a name on the Hub, and a path is of no use to others: give "user/name", or '
            "leave it out"
        )


def _retitle(card: ModelCard, title: str) -> None:
    """Let a card of ours be titled as its repository, unless its maker wrote another title."""
    was = card.data.get("model_name")
    if was and f"\n# {was}\n" in card.text:
        card.text = card.text.replace(f"\n# {was}\n", f"\n# {title}\n", 1)
        card.data["model_name"] = title


def unfinished(directory: Path) -> str:
    """Say what an unfinished training run lacks; empty for any other folder."""
    if not (directory / RECIPE_FILE).is_file() or (directory / METRICS_FILE).is_file():
        return ""
    way = ": the command that began it measures it with --resume" * any(directory.glob("checkpoint-*"))
    return f"the training run in {directory} was not measured to its end, so that its card has no numbers{way}"


def _facts(card: dict[str, Any], function: Callable[..., Any] = save) -> Facts:
    """Return the facts for a card; TypeError: there is no such fact, nor an argument of the function that was given it."""
    known = [f.name for f in fields(Facts)]
    if unknown := sorted(card.keys() - set(known)):
        hint = did_you_mean(unknown[0], [*known, *inspect.signature(function).parameters])
        raise TypeError(f"there is no argument {unknown[0]!r}; {hint}for the card: {', '.join(known)}")
    return Facts(**card)


def _ours(card: str) -> bool:
    return f"\n- {TAG}\n" in card


def _has_own_card(api: HfApi, repo_id: str) -> bool:
    """Tell whether a repository has a card that somebody else wrote."""
    if not api.file_exists(repo_id, README):
        return False
    with tempfile.TemporaryDirectory() as folder:
        return not _ours(_text(Path(api.hf_hub_download(repo_id, README, local_dir=folder))))


def _aside(path: Path, directory: Path) -> bool:
    """Tell whether a file belongs to a checkpoint or a log, or is hidden."""
    return any(part.startswith((".", "checkpoint-", "runs")) for part in path.relative_to(directory).parts)


def _stub(model: nn.Module) -> tuple[dict[str, str], str]:
    """The auto_map of a model, and the file it names."""
    kind = type(model).__name__
    if not isinstance(model, PreTrainedModel) or (autos := loaders(kind)) == [kind]:
        raise ValueError(f"remote_code knows the classes that an auto class of transformers loads, not {kind}")
    code = (
        '"""For trust_remote_code=True: the attention comes from the package hf_longattn, the model from transformers."""\n\n'
        "try:\n    import hf_longattn  # noqa: F401\nexcept ImportError as error:\n"
        f"    raise ImportError({f'this model needs the package hf_longattn: {source()[0]}'!r}) from error\n"
        f"from transformers import {kind} as Base\n\n\nclass {kind}(Base):\n    pass\n"
    )
    return {auto: f"{Path(STUB).stem}.{kind}" for auto in autos}, code


def _tripwire(saved: dict[str, Any]) -> dict[str, list[str]]:
    """The architectures of a saved config, under names that nothing but this package knows."""
    return {"architectures": [TRIPWIRE + name.removeprefix(TRIPWIRE) for name in saved.get("architectures") or ()]}


def _edit(path: Path, **changes: Any) -> None:
    path.write_bytes(_json(json.loads(path.read_text(encoding="utf-8")) | changes))


def _json(data: dict[str, Any]) -> bytes:
    return (json.dumps(data, indent=2, sort_keys=True) + "\n").encode()
