"""What `test_distributed.py` runs in each of two processes: `python distributed_worker.py JOB,JOB RANK STORE OUT CASE...`.

Of the jobs those that shard weights take the cases; the others run every method.
"""

from __future__ import annotations

import dataclasses
import datetime
import faulthandler
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from cases import CASES
from helpers import fresh, tokens, with_sinks
from own_methods import METHODS, Kerple, SharedFactor
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainingArguments
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from typer.testing import CliRunner

import hf_longattn
from hf_longattn import LongAttnConfig
from hf_longattn.integration.dispatch import attention_forward
from hf_longattn.integration.engines import ulysses

RANKS = 2
#: One case of each method, those with parameters per head where there is one.
SPLIT = ("scale_invariant", "calibrated", "mapped+adaptive", "alibi", "infoscale+cosscale", "logn_learned", "log_length")
SPLIT += ("softmax_plus", "yarn_temperature", "output_standardise", "rerope", "leaky_by_layer", "self_extend", "dual_chunk")
SPLIT += ("windowed", "streaming", "lm_infinite", "string_remap", "ssmax", "attention_sink", "attention_sink_learned")
SPLIT += ("yarn_beyond", "output_layer_norm")
#: Those that run on sequences split over processes, some with sliding layers that are left alone, or softcaps.
ALL_SPLIT = (*SPLIT, "gemma3/alibi", "gemma2/logn_learned", "gpt_oss/logn_learned")
#: Those whose weights are saved and loaded again while they are sharded.
SAVED = ("scale_invariant", "logn_learned", "output_layer_norm", "rerope")
#: Those that show what sharded weights do to every method: parameters per head, learned ones, none.
SHARDED = (*SAVED, "alibi")


#: Those whose learned parameters no method of the package has: shared by all heads, tables by distance.
OWN = {
    "shared": LongAttnConfig(temperature=SharedFactor(train_length=5)),
    "shared by own": LongAttnConfig(temperature=SharedFactor(train_length=5, whole=False)),
    "kerple": LongAttnConfig(logit_map=Kerple()),
}


def made(case: str, family: str = "llama") -> PreTrainedModel:
    """A tiny model under a case, with learned factors that differ."""
    torch.manual_seed(0)
    if family == "gpt_oss":  # learned sinks, in layers with a method and without
        rotary = {"rope_type": "default", "rope_theta": 10000.0}
        m = hf_longattn.apply(with_sinks("GptOss", num_experts_per_tok=2, rope_parameters=rotary), CASES[case])
        for layer in m.model.layers:
            layer.self_attn.sinks.data.copy_(torch.linspace(-1, 2, layer.self_attn.sinks.numel()))
        return m
    m = fresh(family, (CASES | OWN)[case])
    torch.manual_seed(0)
    m.resize_token_embeddings(98, mean_resizing=False)  # older releases split the vocabulary, evenly
    for name, parameter in m.named_parameters():
        if ".longattn." in name:
            parameter.data.copy_(torch.linspace(0.5, 1.5, parameter.numel()).view_as(parameter))
    return m


def step(m: Any, **inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and the loss after its backward pass."""
    logits = m(use_cache=False, **inputs).logits
    logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    loss = logits.float().log_softmax(-1)[..., 3].mean()
    loss.backward()
    return logits.detach(), loss.detach()


def gradients(m: torch.nn.Module) -> dict[str, Tensor]:
    out = {}
    for name, parameter in m.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad
            out[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()
    return out


def tensor_parallel(out: Path) -> dict[str, Any]:
    results = {}
    for case in (*SPLIT, *OWN):
        m = AutoModelForCausalLM.from_pretrained(out / case, tp_plan="auto").train()
        logits, _ = step(m, input_ids=tokens())
        results[case] = {"logits": logits, "gradients": gradients(m)}
    return results


def refusal(call: Callable[[], Any]) -> str:
    """What a call is refused with."""
    try:
        call()
    except (NotImplementedError, ValueError) as error:
        return str(error)
    return ""


LENGTHS = (9, 4, 11)


def packed() -> tuple[Tensor, Tensor]:
    """Three documents in one row, whose bounds are not those of the processes' parts; and their position_ids."""
    return tokens(1, sum(LENGTHS), seed=5), torch.cat([torch.arange(n) for n in LENGTHS])[None]


def sequences(case: str) -> dict[str, tuple[Tensor, Tensor]]:
    one = {"one": (tokens(), torch.arange(24).expand(2, -1))}
    if case.startswith("gpt_oss"):  # whose documents transformers does not tell apart
        return one
    return {"packed": packed()} | (one if case == "alibi" else {})


def split_sequence(out: Path) -> dict[str, Any]:
    return _sequences(lambda m: ulysses.split_sequence(m, torch.distributed.group.WORLD))


def start_deepspeed() -> Any:
    import deepspeed

    # compiled for minutes, behind a lock that a killed run leaves
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed("gloo")
    return deepspeed


def forget_exchange(name: str) -> None:
    """Of an earlier model."""
    import deepspeed.runtime.sequence_parallel.parallel_state_sp as state

    ALL_ATTENTION_FUNCTIONS[name] = attention_forward
    state._release_sequence_parallel_groups()


def deepspeed(out: Path) -> dict[str, Any]:
    start_deepspeed()
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    def start(m: PreTrainedModel) -> None:
        name = m.config._attn_implementation
        forget_exchange(name)
        UlyssesSPAttentionHF.register_with_transformers(m, name, RANKS, 1, 24, seq_length_is_variable=True)

    return _sequences(start, batch=1)


ZERO3 = {"stage": 3, "stage3_param_persistence_threshold": 0}
#: torch's own optimiser: DeepSpeed's for the CPU is compiled
DEEPSPEED = {"zero_optimization": ZERO3, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
DEEPSPEED |= {"gradient_clipping": 0.0}  # to 1 unless told


def zero3(out: Path, cases: Sequence[str]) -> dict[str, Any]:
    """A step of DeepSpeed's engine, with weights, gradients and optimiser states in parts."""
    engine = start_deepspeed()
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    results = {}
    mine = tokens().chunk(RANKS)[torch.distributed.get_rank()]
    for case in cases:
        m = made(case).train()
        optimizer = torch.optim.SGD(m.parameters(), lr=1.0)
        model, *_ = engine.initialize(model=m, optimizer=optimizer, config=DEEPSPEED | {"train_micro_batch_size_per_gpu": 1})
        logits = model(mine, use_cache=False).logits
        model.backward(logits.float().log_softmax(-1)[..., 3].mean())
        names = dict(model.module.named_parameters())
        found = {name: safe_get_full_grad(p) for name, p in names.items() if p.requires_grad}
        model.step()
        stepped = {name: safe_get_full_fp32_param(p).clone() for name, p in names.items()}
        results[case] = {"logits": logits.detach(), "gradients": found, "stepped": stepped}
        model.destroy()
    return results


class Repeated(torch.utils.data.Dataset):
    """One window, again and again."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = tokens(1)[0]
        return {"input_ids": ids, "labels": ids, "position_ids": torch.arange(len(ids))}


def trainer(out: Path, **settings: Any) -> list[dict[str, float]]:
    """transformers' Trainer, four steps; what it logs."""
    from transformers import Trainer, default_data_collator

    settings |= {"per_device_train_batch_size": 1, "max_steps": 4, "logging_steps": 1, "save_strategy": "no"}
    settings |= {"report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False, "learning_rate": 0.01}
    arguments = TrainingArguments(output_dir=out / "trainer", **settings)
    run = Trainer(made("logn_learned"), arguments, train_dataset=Repeated(), data_collator=default_data_collator)
    run.train()
    return [{k: x[k] for k in ("loss", "grad_norm")} for x in run.state.log_history if "loss" in x]


def accelerated(out: Path) -> list[dict[str, float]]:
    """The same with accelerate's sequence parallelism, under ZeRO-3; as docs/engines.md has it."""
    start_deepspeed()
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    forget_exchange("logn")
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    handler.sp_attn_implementation = made("logn_learned").config._attn_implementation
    parallelism = ParallelismConfig(sp_backend="deepspeed", sp_size=RANKS, sp_handler=handler)
    auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
    return trainer(out, parallelism_config=parallelism, deepspeed=DEEPSPEED | auto)


def _sequences(start: Any, batch: int | None = None) -> dict[str, Any]:
    """Each process with its half of every sequence, under each case; gradients are summed over both."""
    results: dict[str, Any] = {}
    rank = torch.distributed.get_rank()
    for case in ALL_SPLIT:
        family, _, name = case.rpartition("/")
        for kind, (ids, positions) in sequences(case).items():
            m = made(name, family or "llama").train()
            start(m)
            here = [x[:batch].chunk(RANKS, 1)[rank] for x in (ids, positions)]
            logits, _ = step(m, input_ids=here[0], position_ids=here[1])
            found = gradients(m)
            for gradient in found.values():
                torch.distributed.all_reduce(gradient)
            results[f"{case} {kind}"] = {"logits": logits, "gradients": {k: g / RANKS for k, g in found.items()}}
    m, half = made("alibi"), slice(12 * rank, 12 * rank + 12)
    start(m)
    results["local"] = refusal(lambda: m(tokens()[:batch, half], use_cache=False))
    return results


def fully_sharded(out: Path, cases: Sequence[str]) -> dict[str, Any]:
    """Two steps of training with weights sharded by FSDP2, the second also after saving and loading everything."""
    results: dict[str, Any] = {}
    mine = tokens().chunk(RANKS)[torch.distributed.get_rank()]
    for case in cases:
        m, optimizer = sharded(out / case)
        _, first = step(m, input_ids=mine)
        results[case] = {"gradients": gradients(m)}
        if case not in SAVED:
            continue
        optimizer.step()
        model_state, optimizer_state = get_state_dict(m, optimizer)
        checkpoint.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=out / f"{case}.steps")
        whole = get_model_state_dict(m, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if torch.distributed.get_rank() == 0:
            m.save_pretrained(out / f"{case}.saved", state_dict=whole)
        optimizer.zero_grad()
        _, second = step(m, input_ids=mine)

        m, optimizer = sharded(out / case)
        model_state, optimizer_state = get_state_dict(m, optimizer)
        checkpoint.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=out / f"{case}.steps")
        set_state_dict(m, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
        _, resumed = step(m, input_ids=mine)
        results[case] |= {"losses": [first, second, resumed]}
    if "logn_learned" in cases:
        m, _ = sharded(out / "logn_learned")
        results["late"] = refusal(lambda: hf_longattn.apply(m, "output_layer_norm"))
        results["removed"], _ = step(hf_longattn.remove(m), input_ids=tokens())
    return results


def sharded(path: Path) -> tuple[PreTrainedModel, torch.optim.Optimizer]:
    m = AutoModelForCausalLM.from_pretrained(path).train()
    for layer in m.model.layers:
        fully_shard(layer)
    fully_shard(m)
    return m, torch.optim.AdamW(m.parameters(), lr=0.01)


FIELDS = {f.name for f in dataclasses.fields(TrainingArguments)}
CHECKPOINTING = "activation_checkpointing" if "activation_checkpointing" in FIELDS else "gradient_checkpointing"
#: Recipes: what every process does, and what one alone does to the same windows.
PARALLEL = {
    "sequence": ["method=logn:learned=true", "packing=documents", "sequence_parallel=2"],
    "checkpointing": ["method=output_layer_norm", "sequence_parallel=2", f"trainer.{CHECKPOINTING}=true"],
    "windows": ["method=rerope:window=8", "lora=null", "trainer.max_grad_norm=0.1"],
    "distillation": ["method=scale_invariant", "packing=documents"],  # windows of unequal numbers of counted tokens
}
RESUMED = ("sequence", "windows")
RECIPES = dict.fromkeys(PARALLEL, "continue_lora") | {"distillation": "convert_distill"}


def overrides(out: Path, kind: str, processes: int) -> list[str]:
    """Of a recipe, on what the test has put into the folder; every step takes two windows."""
    each = 2 if processes == 1 or "sequence_parallel=2" in PARALLEL[kind] else 1
    settings = [f"model={out / 'model'}", f"data={out / 'table.jsonl'}", f"heldout={out / 'text.txt'}", "length=24"]
    settings += [f"output={out / f'{kind}.{processes}'}", "evaluation.tokens=72", "evaluation.lengths=[24,48]"]
    settings += [f"trainer.per_device_train_batch_size={each}", "trainer.gradient_accumulation_steps=2"]
    settings += [f"trainer.{k}" for k in ("max_steps=4", "logging_steps=1", "save_steps=2", "eval_steps=2", "use_cpu=true")]
    settings += ["trainer.disable_tqdm=true", "positions=plain"]
    return settings + [x for x in PARALLEL[kind] if processes > 1 or "sequence_parallel" not in x]


def recipes(out: Path) -> dict[str, Any]:
    """Each recipe, and those that are `RESUMED` once more from their first checkpoint."""
    from hf_longattn.training import load_recipe, prepare, run

    results: dict[str, Any] = {}
    for kind in PARALLEL:
        recipe = load_recipe(RECIPES[kind], overrides(out, kind, RANKS))
        results[kind] = run(prepare(recipe))["log"]
        if kind in RESUMED:
            torch.distributed.barrier()
            if torch.distributed.get_rank() == 0:
                shutil.copytree(recipe.output, f"{recipe.output}.whole")
                (Path(recipe.output) / "metrics.json").unlink()
                shutil.rmtree(Path(recipe.output) / "checkpoint-4")
            torch.distributed.barrier()
            results[f"{kind}, resumed"] = run(prepare(recipe, resume=True))["log"]
    return results


def measured(out: Path, processes: int = RANKS) -> dict[int, Any]:
    """Held-out losses of a model whose weights are sharded, as they are under Trainer's own FSDP, which no CPU runs."""
    from hf_longattn.training import load_recipe, prepare
    from hf_longattn.training.trainer import RecipeTrainer

    ready = prepare(load_recipe("continue_lora", [*overrides(out, "windows", processes), f"output={out / 'nowhere'}"]))
    m = AutoModelForCausalLM.from_pretrained(out / "model")
    trainer = RecipeTrainer(ready.recipe, ready.data, m, m, ready.args, ready.tokenizer)
    for module in (*m.model.layers, m) if processes > 1 else ():
        fully_shard(module)
    return trainer.held_out_metrics([24, 48])


def command(*words: str | Path) -> dict[str, Any]:
    """What `hf-longattn` says in this process, and how it ends."""
    from hf_longattn.cli import app

    result = CliRunner().invoke(app, [str(word) for word in words])
    return {"status": result.exit_code, "output": result.output, "error": repr(result.exception)}


def train(out: Path) -> dict[str, Any]:
    """`hf-longattn train`."""
    kind = "distillation"
    return command("train", RECIPES[kind], *overrides(out, kind, RANKS), f"output={out / 'trained'}")


def evaluate(out: Path, processes: int = RANKS) -> dict[str, Any]:
    """`hf-longattn eval` of two settings, its rows in turns."""
    options = {"text": out / "text.txt", "method": "scale_invariant:tau=3", "lengths": "256,384", "targets": "32"}
    options |= {"out": out / f"report.{processes}", "tasks": "loss,passkey", "samples": "2", "device": "cpu"}
    return command("eval", out / "model", *(word for name, value in options.items() for word in (f"--{name}", value)))


WITH_CASES = {f.__name__: f for f in (fully_sharded, zero3)}
JOBS = {f.__name__: f for f in (tensor_parallel, split_sequence, recipes, measured, train, evaluate, deepspeed, accelerated)}


if __name__ == "__main__":
    jobs, rank, store, out, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    for kind in METHODS:
        hf_longattn.register(kind)
    faulthandler.dump_traceback_later(390, exit=True)
    warnings.simplefilter("ignore", hf_longattn.UntrainedWarning)
    torch.distributed.init_process_group(
        "gloo", f"file://{store}", rank=int(rank), world_size=RANKS, timeout=datetime.timedelta(seconds=120)
    )
    for job in jobs.split(","):
        result = JOBS[job](Path(out)) if job in JOBS else WITH_CASES[job](Path(out), cases)
        torch.save(result, Path(out) / f"{job}.{rank}")
    torch.distributed.destroy_process_group()
