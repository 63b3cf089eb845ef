"""A recipe's `parallel`: windows in parts, and weights in parts, one for each process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from transformers import TrainingArguments

from ..integration.engines.ulysses import check_heads
from .held_out import held_out_sums
from .recipe import Recipe
from .trainer import RecipeTrainer

#: In a checkpoint's folder, what the Trainer writes as one file: trained weights and the optimiser's states.
FOLDER, SCHEDULER = "sharded", "scheduler.pt"
_TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)


def check(recipe: Recipe, args: TrainingArguments, text: Any) -> None:
    """Raise ValueError where the processes at hand, or the model's heads, cannot be divided as the recipe says."""
    count = recipe.parallel.sequence
    if args.world_size % count:
        raise ValueError(f"parallel.sequence is {count}, which does not divide the number of processes, {args.world_size}")
    if recipe.parallel.shard and recipe.lora is not None and recipe.dtype != "float32":
        raise ValueError(
            f"parallel.shard needs weights of one precision, and adapters are in float32, not {recipe.dtype}: "
            "take dtype=float32 (trainer.bf16=true multiplies in bfloat16)"
        )
    if recipe.parallel.shard and args.world_size == 1:
        raise ValueError("parallel.shard needs several processes: torchrun or accelerate launch starts them")
    if count > 1:
        check_heads(text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads, count)


class ShardedTrainer(RecipeTrainer):
    """With weights, gradients and optimiser states sharded by torch's own FSDP2, on any device."""

    def __init__(self, recipe: Recipe, data: Any, model: Any, causal: Any, args: TrainingArguments, tokenizer: Any) -> None:
        super().__init__(recipe, data, model, causal, args, tokenizer)
        self.accelerator.prepare_model(model, evaluation_mode=True)  # precision and device, without DDP
        model._is_accelerate_prepared = True
        for layer in [m for m in causal.modules() if type(m).__name__ in causal._no_split_modules]:
            fully_shard(layer)
        fully_shard(model)
        model.longattn_held_out = held_out_sums
        register_fsdp_forward_method(model, "longattn_held_out")

    def _held_out_sums(self, *arguments: Any) -> dict[int, Tensor]:
        result: dict[int, Tensor] = self.model.longattn_held_out(*arguments)
        return result

    def whole(self) -> dict[str, Any] | None:
        return get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        weights = self.whole()
        if self.args.should_save:
            self._save(output_dir, state_dict=weights)

    def _states(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer.optimizer, options=_TRAINED)
        return {"model": model, "optimizer": optimizer}

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state_dict_saver.save(self._states(), checkpoint_id=Path(output_dir) / FOLDER)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Weights come with the optimiser's states, after this."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        states = self._states()
        state_dict_loader.load(states, checkpoint_id=Path(checkpoint) / FOLDER)
        set_state_dict(
            self.model,
            self.optimizer.optimizer,
            model_state_dict=states["model"],
            optim_state_dict=states["optimizer"],
            options=_TRAINED,
        )
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))
