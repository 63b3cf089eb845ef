"""A pretrained model in five minutes: what gets better without training, what it costs, and a method that is trained.

1. Farther than trained: passages behind which the positions jump, so that what follows stands as if far from them; unmodified,
   with YaRN, and with `hf_longattn.extend`.
2. A method that a pretrained model has to be trained for: scale-invariant attention as published, calibrated, and adapted by a
   short LoRA run, on held-out text. The adapter is saved, reloaded, and has to give the same logits.

Leaves summary.md, plot.png and the adapter in --out. Float32 throughout, so that every CPU multiplies it fast.
"""

import argparse
import sys
import time
import warnings
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, set_seed

import hf_longattn
from hf_longattn.evaluation.measures.probe import AFTER, BEFORE, PASSAGE, Probe, passages, probe
from hf_longattn.evaluation.rows import versions_line
from recipes.demo.report import write_plot, write_summary
from recipes.models import SMOLLM2, obtain, random_model

HELD_OUT = 8192


def main() -> None:
    args = arguments()
    start = time.monotonic()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)  # PEFT's use of transformers
    warnings.simplefilter("ignore", hf_longattn.UntrainedWarning)  # this is about just that
    set_seed(args.seed)
    folder = random_model(args.models) if args.quick else obtain(SMOLLM2, args.models)
    tokens = AutoTokenizer.from_pretrained(folder)(read(args.text), return_tensors="pt")["input_ids"][0]
    if len(tokens) < (needed := HELD_OUT + args.steps * args.window):
        sys.exit(f"--text gives {len(tokens)} tokens; at least {needed} are needed")
    training, held_out = tokens[:-HELD_OUT], tokens[-HELD_OUT:]

    trained = AutoConfig.from_pretrained(folder).max_position_embeddings
    far = {}
    for name in ("unmodified", "YaRN × 2", "extend"):
        heading(f"{name}: up to {2 * trained:,} positions")
        far[name] = read_far(longer(folder, name, 2 * trained), held_out, trained)

    heading("scale-invariant attention: as published, and calibrated")
    windows = held_out.unfold(0, args.window, HELD_OUT // args.windows)
    model = load(folder)
    near = {"unmodified": loss(model, windows)}
    near["as published"] = loss(hf_longattn.apply(model, "scale_invariant"), windows)
    config = hf_longattn.calibrate(load(folder), [training[None, :1024]], "scale_invariant")
    near["calibrated"] = loss(hf_longattn.apply(model, config), windows)

    heading(f"adapting: {args.steps} LoRA steps on windows of {args.window}")
    adapt(model := wrapped(model), training, args)
    near["calibrated and adapted"] = loss(model, windows)

    heading("save, reload, compare")
    difference = save_and_reload(model, args.out / "adapter", windows[:1])
    clock, cpu = (time.monotonic() - start) / 60, time.process_time() / 60
    busy = " (on a machine that did other work)" if clock > 2 * cpu else ""
    facts = {
        **{"model": (folder / "SOURCE").read_text(), "trained": trained, "steps": args.steps, "window": args.window},
        "text": str(args.text or "the Python language reference (pydoc_data.topics), repeated paragraphs dropped"),
        "measured": windows.numel(),
        "difference": difference,
        "minutes": f"{cpu:.1f} minutes of CPU time, {clock:.1f} by the clock{busy}",
        "how": f"seed {args.seed}, {torch.get_num_threads()} threads; "
        + versions_line("hf_longattn", "transformers", "torch", "peft"),
    }
    write_plot(args.out / "plot.png", far, near, facts)
    write_summary(args.out / "summary.md", far, near, facts)
    print((args.out / "summary.md").read_text())
    print(f"Written: {args.out / 'summary.md'}, {args.out / 'plot.png'}, {args.out / 'adapter'}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a plain text file to train on and, its last part, to measure on")
    parser.add_argument("--steps", type=int, default=24, help="LoRA steps, each on one window (default %(default)s)")
    parser.add_argument("--window", type=int, default=256, help="tokens in a training window (default %(default)s)")
    parser.add_argument("--windows", type=int, default=4, help="held-out windows to measure on (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="where results go (default ./%(default)s)")
    parser.add_argument("--models", type=Path, default=Path("models"), help="where the model is kept (default ./%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny random model and windows: seconds, to test the script")
    args = parser.parse_args()
    if args.quick:
        args.steps, args.window = 4, 32
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


def longer(folder: Path, name: str, to: int):
    """The model, made to read `to` tokens in the way that a setting's name says."""
    if name == "extend":
        return hf_longattn.extend(load(folder), to=to)
    config = AutoConfig.from_pretrained(folder)
    return load(folder, config=hf_longattn.rope.yarn(config, 2.0) if name.startswith("YaRN") else config)


def read_far(model, tokens: Tensor, trained: int) -> Probe:
    """Losses on other text and on a copy, behind jumps to near, to the trained length, and to twice that length."""
    near, twice = BEFORE + AFTER, 2 * trained - PASSAGE
    found = probe(model, passages(tokens[None], 2), (near, trained, twice))
    for row in found.rows():
        print(f"{row['distance']:>6,} tokens back: other text {row['text'][0]:.3f}, the copy {row['copy'][0]:.3f}", flush=True)
    return found


@torch.no_grad()
def loss(model, windows: Tensor) -> float:
    """Mean loss over windows (number, tokens), each read by itself."""
    found = torch.stack([model(input_ids=w[None], labels=w[None]).loss for w in windows.to(model.device)]).mean().item()
    print(f"held-out loss {found:.3f}", flush=True)
    return found


def wrapped(model):
    """A LoRA adapter that records the attention: it reloads as the same model, and switched off it is the base model."""
    modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
    lora = LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules=modules)
    return get_peft_model(model, lora)


def adapt(model, training: Tensor, args: argparse.Namespace) -> None:
    settings = TrainingArguments(
        output_dir=str(args.out / "adapter"),
        max_steps=args.steps,
        per_device_train_batch_size=1,
        learning_rate=1e-3,
        dataloader_pin_memory=torch.cuda.is_available(),
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        seed=args.seed,
    )
    data = [{"input_ids": w, "labels": w} for w in training.split(args.window)[:-1]]
    Trainer(model, settings, train_dataset=data).train()
    model.eval()


@torch.no_grad()
def save_and_reload(model, adapter: Path, tokens: Tensor) -> float:
    """The largest difference of logits between the model and its saved and reloaded self; an error if there is any."""
    model.save_pretrained(adapter)
    again = AutoModelForCausalLM.from_pretrained(adapter, dtype=torch.float32).to(model.device).eval()
    tokens = tokens.to(model.device)
    difference = (model(input_ids=tokens).logits - again(input_ids=tokens).logits).abs().max().item()
    if not difference < 1e-6:
        raise RuntimeError(f"the reloaded model's logits differ by {difference}")
    print(f"largest difference of logits after reload: {difference}")
    return difference


if __name__ == "__main__":
    main()
