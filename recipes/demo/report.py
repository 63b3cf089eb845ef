"""The demo's results as one picture and one page."""

import itertools
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_longattn.measuring.report.figures import png, pyplot
from hf_longattn.measuring.report.markdown import table

Results = dict[str, dict[str, Tensor]]
LABELS = {
    "unmodified": "unmodified",
    "scale_invariant": "scale-invariant (τ = 10), no training",
    "mild": "mild (τ = 1000, first token exempt), no training",
    "control": "unmodified, LoRA (control)",
    "adapted": "scale-invariant (τ = 10), LoRA",
}
STYLE = {
    "unmodified": {"color": "black"},
    "scale_invariant": {"color": "tab:red"},
    "mild": {"color": "tab:orange"},
    "control": {"color": "black", "linestyle": "--"},
    "adapted": {"color": "tab:blue"},
}


def ranges(long: int) -> list[tuple[int, int]]:
    """Position ranges that double: up to 1/8, 1/4, 1/2 and the whole of the long window."""
    ends = [0, long // 8, long // 4, long // 2, long]
    return list(itertools.pairwise(ends))


def write_plot(path: Path, results: Results, curves: dict[str, list[tuple[int, float]]], facts: dict[str, Any]) -> None:
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(12, 5.4), layout="constrained")
    for name, losses in results.items():
        means = [losses["long"][a:b].mean().item() for a, b in ranges(facts["long"])]
        left.plot(range(len(means)), means, marker="o", label=LABELS[name], **STYLE[name])
    left.set_xticks(range(4), [f"{a}–{b}" for a, b in ranges(facts["long"])])
    left.set(xlabel="position in the held-out text (tokens)", ylabel="loss (nats per token)")
    left.set_title(f"One window of {facts['long']} tokens")

    for name, curve in curves.items():
        right.plot(*zip(*curve, strict=True), marker="o", label=LABELS[name], **STYLE[name])
    base = results["unmodified"]["short"].mean().item()
    right.axhline(base, color="grey", linewidth=1, linestyle=":", label="unmodified, before training")
    right.set(xlabel=f"LoRA step (one window of {facts['window']} tokens each)", ylabel="held-out loss (nats per token)")
    right.set_title(f"In-window loss while adapting, windows of {facts['window']}")

    for axes in (left, right):
        axes.grid(alpha=0.3)
    handles = [*left.get_lines(), right.get_lines()[-1]]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    path.write_bytes(png(figure))


def write_summary(path: Path, results: Results, generated: dict[str, str], facts: dict[str, Any]) -> None:
    short = {name: r["short"].mean().item() for name, r in results.items()}
    head, rows = ["", f"windows of {facts['window']}", *(f"{a}–{b}" for a, b in ranges(facts["long"]))], []
    for name, r in results.items():
        long = [f"{r['long'][a:b].mean():.3f}" for a, b in ranges(facts["long"])]
        rows.append([LABELS[name], f"{short[name]:.3f}", *long])

    def delta(name: str, other: str) -> str:
        return f"{short[name] - short[other]:+.3f}"

    text = f"""\
# Scale-invariant attention in a pretrained model

**Model:** {facts["model"]}.
**Text:** {facts["text"]}; the last {facts["long"]} tokens are held out and everything here is measured on them.

Loss in nats per token, in float32. The first column reads the text in separate windows of {facts["window"]} tokens (every
second one), the others by position in one window of {facts["long"]}.

{table(head, rows)}

- **Switched on without training**, the method changes the loss in short windows by {delta("scale_invariant", "unmodified")}:
  the model was pretrained with other attention, and until it is adapted the method harms it. The mild form changes
  short windows by {delta("mild", "unmodified")}.
- **Adapted** by {facts["steps"]} LoRA steps on windows of {facts["window"]} tokens: {delta("adapted", "unmodified")} against
  the unmodified model, but {delta("adapted", "control")} against the control, which was trained on the same windows in the
  same order without the method: what the control gains over the unmodified model comes from the text.
- This run shows that the method runs, trains and survives saving. It does not show a gain on long text: for that, the paper
  trains from scratch with p-RoPE, and windows this short teach little about long ones.
- **Saved and reloaded:** adapter and config; largest difference of logits {facts["difference"]:g}. The adapter's folder holds
  the model's config.json too, because that is what names the attention: the adapter alone would load under the unmodified one.

Greedy continuations of one prompt:

{chr(10).join(f"- *{LABELS[name]}:* {' '.join(text.split())}" for name, text in generated.items())}

![loss by position, and while adapting](plot.png)

`{facts["command"]}`, seed {facts["seed"]}, {facts["minutes"]:.1f} minutes ({facts["cpu_minutes"]:.1f} CPU minutes);
{facts["versions"]}.
"""
    path.write_text(text, encoding="utf-8")
