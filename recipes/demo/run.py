"""Scale-invariant attention in a pretrained model, end to end: generate, measure, adapt, save, reload, report.

Reads a held-out text with the unmodified model and under the method; adapts the model to the method with a short LoRA
run, beside a control that is trained alike without it; saves the adapter, reloads it and checks that the logits are equal.
Leaves plot.png, summary.md and the adapter in --out.
"""

import argparse
import sys
import time
import warnings
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, set_seed

import hf_longattn
from hf_longattn.measuring.evaluation import token_losses
from hf_longattn.measuring.rows import versions_line
from recipes.demo.report import write_plot, write_summary
from recipes.models import SMOLLM2, obtain, random_model

PROMPT = "The old lighthouse keeper climbed the stairs every evening, because"
METHODS = {
    "unmodified": None,
    "scale_invariant": {},  # the paper's default, τ = 10
    "mild": {"tau": 1000.0, "sink_tokens": 1},  # leaves near tokens and the first token alone
}


def main() -> None:
    args = arguments()
    start = time.monotonic()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)  # PEFT's use of transformers
    set_seed(args.seed)
    folder = random_model(args.models) if args.quick else obtain(SMOLLM2, args.models)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(read(args.text), return_tensors="pt")["input_ids"][0]
    if len(tokens) < args.long + args.window:
        sys.exit(f"--text gives {len(tokens)} tokens; at least {args.long + args.window} are needed")
    training, held_out = tokens[: -args.long], tokens[-args.long :]

    model = load(folder)
    results, generated = {}, {}
    for name, parameters in METHODS.items():
        if parameters is not None:
            hf_longattn.apply(model, "scale_invariant", **parameters)
        heading(f"{name}: {hf_longattn.describe(model).rows[0][1]} in every layer, no training")
        results[name] = held_out_losses(model, held_out, args.window)
        generated[name] = generate(model, tokenizer)

    curves = {}
    for name, implementation in (("control", "sdpa"), ("adapted", "scale_invariant")):
        heading(f"{name}: {args.steps} LoRA steps under {implementation}")
        model, curves[name] = adapt(folder, implementation, training, held_out, args)
        results[name] = held_out_losses(model, held_out, args.window)
        generated[name] = generate(model, tokenizer)

    heading("save, reload, compare")
    difference = save_and_reload(model, folder, args.out / "adapter", held_out[None, : args.window])
    facts = {
        "model": (folder / "SOURCE").read_text(),
        "text": str(args.text)
        if args.text
        else "the Python language reference (pydoc_data.topics), repeated paragraphs dropped",
        "command": "python " + " ".join(sys.argv),
        "seed": args.seed,
        "steps": args.steps,
        "window": args.window,
        "long": args.long,
        "difference": difference,
        "versions": versions_line("hf_longattn", "transformers", "torch", "peft"),
        "minutes": (time.monotonic() - start) / 60,
        "cpu_minutes": time.process_time() / 60,
    }
    write_plot(args.out / "plot.png", results, curves, facts)
    write_summary(args.out / "summary.md", results, generated, facts)
    print((args.out / "summary.md").read_text())
    print(f"Written: {args.out / 'summary.md'}, {args.out / 'plot.png'}, {args.out / 'adapter'}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a plain text file to train on and, its last part, to measure on")
    parser.add_argument("--steps", type=int, default=40, help="LoRA steps, each on one window (default %(default)s)")
    parser.add_argument("--window", type=int, default=512, help="tokens in a training window (default %(default)s)")
    parser.add_argument("--long", type=int, default=4096, help="tokens in the long held-out window (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="where results go (default ./%(default)s)")
    parser.add_argument("--models", type=Path, default=Path("models"), help="where the model is kept (default ./%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny random model and windows: seconds, to test the script")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.window, args.long = 4, 32, 128
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def heading(text: str) -> None:
    print(f"\n== {text}", flush=True)


def read(path: Path | None) -> str:
    """The user's text, or the language reference that every Python carries."""
    if path:
        return path.read_text(encoding="utf-8")
    paragraphs = "\n\n".join(topics.values()).split("\n\n")
    return "\n\n".join(dict.fromkeys(p.strip("\n") for p in paragraphs))  # topics repeat each other


def load(folder: Path, **kwargs):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **kwargs).eval()


def held_out_losses(model, held_out: Tensor, window: int) -> dict[str, Tensor]:
    """Losses of the held-out text, read as one long window ("long") and in pieces of a training window ("short")."""
    model, held_out = getattr(model, "get_base_model", lambda: model)(), held_out.to(model.device)
    short = torch.stack([token_losses(model, piece[None])[0, 1:].cpu() for piece in pieces(held_out, window)])
    long = token_losses(model, held_out[None], prefill=window)[0, 1:].cpu()
    print(f"loss: {short.mean():.3f} in windows of {window}, {long.mean():.3f} in one window of {len(held_out)}")
    return {"short": short, "long": long}


def pieces(tokens: Tensor, window: int) -> list[Tensor]:
    return list(tokens.split(window)[::2])  # every second one: half the time


def generate(model, tokenizer) -> str:
    inputs = tokenizer(PROMPT, return_tensors="pt", add_special_tokens=False).to(model.device)
    tokens = model.generate(**inputs, max_new_tokens=30, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    text = tokenizer.decode(tokens[0], skip_special_tokens=True)
    print(text)
    return text


def adapt(folder: Path, implementation: str, training: Tensor, held_out: Tensor, args: argparse.Namespace):
    """A LoRA run on short windows; the adapted model, and its held-out loss by step."""
    set_seed(args.seed)
    lora = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    model = get_peft_model(load(folder, attn_implementation=implementation), lora)
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=str(args.out / "adapter"),
            max_steps=args.steps,
            per_device_train_batch_size=1,
            per_device_eval_batch_size=1,
            learning_rate=1e-3,
            eval_strategy="steps",
            eval_steps=max(args.steps // 4, 1),
            eval_on_start=True,
            prediction_loss_only=True,
            dataloader_pin_memory=torch.cuda.is_available(),
            disable_tqdm=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            seed=args.seed,
        ),
        train_dataset=[{"input_ids": w, "labels": w} for w in training.split(args.window)[:-1]],
        eval_dataset=[{"input_ids": w, "labels": w} for w in pieces(held_out, args.window)],
    )
    trainer.train()
    return model.eval(), [(log["step"], log["eval_loss"]) for log in trainer.state.log_history if "eval_loss" in log]


@torch.no_grad()
def save_and_reload(model, folder: Path, adapter: Path, tokens: Tensor) -> float:
    """The largest difference of logits between the model and its saved and reloaded self; an error if there is any."""
    model.save_pretrained(adapter)
    model.config.save_pretrained(adapter)  # PEFT saves no config of the model, and that is what names the attention
    config = AutoConfig.from_pretrained(adapter)
    again = PeftModel.from_pretrained(load(folder, config=config), adapter).to(model.device).eval()
    print(hf_longattn.describe(again).rows[0])
    tokens = tokens.to(model.device)
    difference = (model(input_ids=tokens).logits - again(input_ids=tokens).logits).abs().max().item()
    if not difference < 1e-6:
        raise RuntimeError(f"the reloaded model's logits differ by {difference}")
    print(f"largest difference of logits after reload: {difference}")
    return difference


if __name__ == "__main__":
    main()
