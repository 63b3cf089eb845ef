"""The demo's results as one picture and one page."""

from pathlib import Path
from typing import Any

from hf_longattn.evaluation.measures.probe import AFTER, BEFORE, PASSAGE, TOKENS, Probe
from hf_longattn.evaluation.report import markdown
from hf_longattn.evaluation.report.figures import png, pyplot

Far = dict[str, Probe]
COLOURS = {"unmodified": "black", "YaRN × 2": "tab:orange", "extend": "tab:blue"}


def write_plot(path: Path, far: Far, near: dict[str, float], facts: dict[str, Any]) -> None:
    figure, axes = pyplot().subplots(1, 3, figsize=(13, 4.2), layout="constrained", width_ratios=(3, 3, 2))
    titles = ("A copy, by how far back the first reading is", "Other text behind the same jump")
    for panel, which, title in zip(axes[:2], ("copy", "text"), titles, strict=True):
        for name, found in far.items():
            panel.plot(found.distances, [r[which][0] for r in found.rows()], marker="o", label=name, color=COLOURS[name])
        panel.axvline(facts["trained"], color="grey", linewidth=1, linestyle=":", label="trained length")
        panel.set(xlabel="tokens back", title=title)
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("loss (nats per token)")
    axes[0].legend()
    axes[2].bar(range(len(near)), list(near.values()), color=["black", "tab:red", "tab:pink", "tab:green"])
    for x, value in enumerate(near.values()):
        axes[2].annotate(f"{value:.2f}", (x, value), ha="center", va="bottom", fontsize=9)
    axes[2].set_xticks(range(len(near)), [n.replace(" and ", "\nand ") for n in near], rotation=30, ha="right")
    axes[2].set(title=f"Scale-invariant, windows of {facts['window']}", ylim=(0, None))
    path.write_bytes(png(figure))


def write_summary(path: Path, far: Far, near: dict[str, float], facts: dict[str, Any]) -> None:
    back = far["unmodified"].distances
    head = ["", *(x for n in back for x in (f"copy, {n:,} back", "other text"))]
    rows = [[name, *(f"{r[x][0]:.3f}" for r in found.rows() for x in ("copy", "text"))] for name, found in far.items()]

    def of(name: str, which: str, point: int) -> float:
        return float(far[name].rows()[point][which][0])

    def price(name: str, which: str) -> str:
        return f"{round(of(name, which, 0) - of('unmodified', which, 0), 3) + 0.0:+.3f}"  # no -0.000

    adapted = [[name, f"{x:.3f}", f"{x - near['unmodified']:+.3f}"] for name, x in near.items()]
    text = f"""\
# A pretrained model in five minutes

**Model:** {facts["model"]}. Trained at {facts["trained"]:,} tokens.
**Text:** {facts["text"]}; nothing is measured on what was trained on.

## Farther than trained, without training

`hf_longattn.extend(model, to={2 * facts["trained"]})`. {BEFORE:,} tokens are read, then {AFTER} of other text, then {PASSAGE}
that repeat the first. The table is the loss on both, in nats per token, with positions that jump in between, so that
{TOKENS:,} tokens stand for a text of up to {2 * facts["trained"]:,}. Mean over two passages.

{markdown(head, rows)}

- **The gain:** {back[-1]:,} tokens back the unmodified model has lost the passage ({of("unmodified", "copy", -1):.2f} nats a
  token, nearby {of("unmodified", "copy", 0):.2f}) and the text itself ({of("unmodified", "text", -1):.2f}). YaRN has
  {of("YaRN × 2", "copy", -1):.2f} and {of("YaRN × 2", "text", -1):.2f}, `extend` {of("extend", "copy", -1):.2f} and
  {of("extend", "text", -1):.2f}.
- **The cost** nearby, on the copy and on other text: `extend` {price("extend", "copy")} and {price("extend", "text")}, YaRN
  {price("YaRN × 2", "copy")} and {price("YaRN × 2", "text")}. Under `extend` far tokens all seem equally far: their order is
  lost. A real text of this length has more keys to confuse: [longer.md](../lab/longer.md) has whole texts.

![loss by distance, and of scale-invariant attention](plot.png)

## A method that needs training

Scale-invariant attention (τ = 10) on {facts["measured"]:,} held-out tokens in windows of {facts["window"]}:

{markdown(["", "loss", "against the unmodified model"], adapted)}

- **As published it harms** a model that was pretrained with other attention. **Calibrated**, that is with each head's logits
  [measured](../lab/calibration.md) on 1,024 tokens first, it harms less, and {facts["steps"]} LoRA steps on other windows of
  the same kind of text adapt the model to it.
- **The cost:** a control trained in the same way without the method also gains from the text, and gains more
  ([training.md](../lab/training.md#short-runs-on-smollm2)). What the method is for, long texts after training from scratch,
  windows this short cannot show: [length.md](../lab/length.md) does.
- **Saved and reloaded:** one LoRA adapter, which records the method; largest difference of logits
  {facts["difference"]:g}.

`make demo`: {facts["minutes"]}; {facts["how"]}.
"""
    path.write_text(text, encoding="utf-8")
