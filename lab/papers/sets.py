"""Sets of items and one query: the model of Veličković et al., App. A, trained on small sets and measured on large ones.

Max retrieval (their Table 1), the same task under output norms, and dictionary lookup (Li et al., Tables 1 to 6).
Attention is `hf_longattn`'s: the norm is part of the model, a temperature is put in when it is measured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_longattn import LongAttnConfig, fit_adaptive_temperature
from hf_longattn.core.attend import attend
from hf_longattn.core.call import Call
from hf_longattn.core.geometry import AttentionLayout
from hf_longattn.methods import AdaptiveTemperature
from hf_longattn.slots.method import ModelFacts
from lab.papers.experiment import Run, Settings, experiment
from lab.papers.samples import CLASSES, KEYS, VALUES, dictionary_lookup, max_retrieval

#: Items in memory at a time when large sets are measured.
CHUNK = 1 << 14
NORMS = {
    "baseline": LongAttnConfig(),
    "layer_norm": LongAttnConfig.preset("output_layer_norm"),
    "standardise": LongAttnConfig.preset("output_standardise"),
}


#: Steps after which the spread of logits is read beside its bound.
SPREAD_AT = (0, 100, 300, 1000, 2000, 3000, 5000)


class SetModel(nn.Module):
    """y = φ(norm(Σ softmax(q·K h_i) V h_i)), h_i = ψ_x(x_i), q = Q ψ_q(query); two-layer GELU networks ψ_x, ψ_q and φ.

    Args:
        embed: from a task's raw inputs to items (batch, items, features) and query (batch, query_features).
    """

    def __init__(
        self,
        features: int,
        query_features: int,
        classes: int,
        config: LongAttnConfig,
        width: int,
        embed: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.embed, self.config, self.width = embed, config, width
        self.item = nn.Sequential(nn.Linear(features, width), nn.GELU("tanh"), nn.Linear(width, width), nn.GELU("tanh"))
        self.ask = nn.Sequential(nn.Linear(query_features, width), nn.GELU("tanh"), nn.Linear(width, width))
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.predict = nn.Sequential(nn.Linear(width, width), nn.GELU("tanh"), nn.Linear(width, classes))
        one_head = ModelFacts(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=width, value_dim=width, train_length=None)
        learned = None if config.output_norm is None else config.output_norm.module(one_head)
        self.learned = nn.ModuleDict({} if learned is None else {"output_norm": learned})

    def project(self, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query (batch, 1, 1, width), keys and values (batch, 1, items, width)."""
        items, query = inputs if self.embed is None else self.embed(*inputs)
        h = self.item(items)[:, None]
        return self.query(self.ask(query))[:, None, None], self.key(h), self.value(h)

    def logits(self, query: Tensor, key: Tensor) -> Tensor:
        """What the softmax of plain attention sees, (batch, items)."""
        return (self.width**-0.5 * query @ key.transpose(-1, -2))[:, 0, 0]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, temperature: AdaptiveTemperature | None = None) -> Tensor:
        """The attention output after the norm, (batch, width): what the rest of the model sees."""
        config = self.config if temperature is None else self.config.replace(temperature=temperature)
        rows = AttentionLayout.causal(1, key.shape[2], None, 0, key.device)  # one query, which comes last and sees every item
        learned = dict(self.learned.items())
        return attend(Call(query, key, value, config, rows, self.width**-0.5, learned=learned))[:, 0, 0]

    def forward(self, *inputs: Tensor) -> Tensor:
        """Logits of the classes, (batch, classes)."""
        return self.predict(self.out(self.attend(*self.project(*inputs))))


class Entries(nn.Module):
    """Key and value classes of a dictionary's items, embedded side by side; the query is its key's embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.keys, self.values = nn.Embedding(KEYS, width // 2), nn.Embedding(VALUES, width // 2)

    def forward(self, key: Tensor, value: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([self.keys(key), self.values(value)], -1), self.keys(query)


#: (items, batch, generator) -> inputs of the model, and the answers.
Draw = Callable[[int, int, torch.Generator], tuple[Tensor, ...]]


def argmax_model(norm: str, settings: Settings) -> tuple[SetModel, Draw]:
    return SetModel(1 + CLASSES, 1, CLASSES, NORMS[norm], settings.width), max_retrieval


def dictionary_model(norm: str, settings: Settings) -> tuple[SetModel, Draw]:
    width = settings.width
    return SetModel(width, width // 2, VALUES, NORMS[norm], width, Entries(width)), dictionary_lookup


@torch.no_grad()
def start_as_flax(model: nn.Module) -> None:
    """Weights from a normal cut off at two deviations, of variance 1/inputs, and no bias; torch's have a third of that."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            deviation = module.in_features**-0.5 / 0.87962566  # the cut takes that much off the deviation
            nn.init.trunc_normal_(module.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
            nn.init.zeros_(module.bias)


def largest_at(settings: Settings, step: int) -> int:
    """The most items in a set at that step."""
    if not hasattr(settings, "first"):
        return settings.largest
    return settings.first + (settings.largest - settings.first) * step // max(settings.steps - 1, 1)


def train(
    model: SetModel,
    draw: Draw,
    settings: Settings,
    seed: int,
    l2: float | None = None,
    before_step: Callable[[int], None] = lambda step: None,
) -> float:
    """AdamW, or with `l2` Adam and an L2 term in the loss, on sets of one random size a step.

    Returns:
        the mean loss of the last tenth of the steps, without that term.
    """
    generator = torch.Generator().manual_seed(seed)
    rate = settings.learning_rate
    optimizer: torch.optim.Optimizer
    if l2 is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=settings.weight_decay)
    else:  # Adam's own weight_decay is the gradient of λ/2 |w|²
        optimizer = torch.optim.Adam(model.parameters(), lr=rate, weight_decay=l2)
    losses = []
    for step in range(settings.steps):
        before_step(step)
        items = int(torch.randint(settings.smallest, largest_at(settings, step) + 1, (), generator=generator))
        *inputs, answers = draw(items, settings.batch, generator)
        loss = nn.functional.cross_entropy(model(*inputs), answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    before_step(settings.steps)
    return float(torch.stack(losses[-max(len(losses) // 10, 1) :]).mean())


@torch.no_grad()
def spread_and_bound(model: SetModel, *inputs: Tensor) -> tuple[float, float]:
    """The largest spread δ of a row's logits, and of Veličković et al., Proposition 3.1: 2 σ(Q) σ(K) |y| max |x|, each times
    the 1/√d of our logits. The bias of the queries counts as one more input, that of the keys is the same for all items.
    """
    items, query = inputs if model.embed is None else model.embed(*inputs)
    x, y = model.item(items), model.ask(query)
    logits = model.logits(*model.project(*inputs)[:2])
    spread = (logits.amax(-1) - logits.amin(-1)).max()
    wide = torch.linalg.matrix_norm(torch.cat([model.query.weight, model.query.bias[:, None]], 1), 2)
    length = (y.square().sum(-1) + 1).sqrt() * x.norm(dim=-1).amax(-1)
    bound = 2 * wide * torch.linalg.matrix_norm(model.key.weight, 2) * length.max() * model.width**-0.5
    return float(spread), float(bound)


@torch.no_grad()
def refit(model: SetModel, settings: Settings, seed: int) -> AdaptiveTemperature:
    """The paper's fit (App. F) on this model's own logits, from fresh sets of every size up to `fitted_up_to`."""
    generator = torch.Generator().manual_seed(2_000_000 + seed)
    logits, targets = [], []
    for size in (s for s in settings.sizes if s <= settings.fitted_up_to):
        for count in _batches(settings.fitted, size):
            features, query, _ = max_retrieval(size, count, generator)
            logits += list(model.logits(*model.project(features, query)[:2]))
            targets += features[..., 0].argmax(1).tolist()
    return fit_adaptive_temperature(logits, targets)


@torch.no_grad()
def by_size(
    model: SetModel, draw: Draw, temperatures: dict[str, AdaptiveTemperature | None], settings: Settings, seed: int
) -> dict[str, dict[str, list[float]]]:
    """Of every temperature, for each size: accuracy, and of the outputs that the rest of the model sees their deviation
    across sets (a mean over features), their deviation across features and their mean (means over sets).

    Under "attention": the mean entropy of plain attention, in nats, and for max retrieval the share of sets in which the
    largest item holds the largest logit, which no temperature changes. All models of a seed are measured on the same sets.
    """
    out: dict[str, dict[str, list[float]]] = {
        name: {"accuracy": [], "deviation": [], "spread": [], "mean": []} for name in temperatures
    }
    attention: dict[str, list[float]] = {"entropy": [], "largest": []}
    for size in settings.sizes:
        generator = torch.Generator().manual_seed(1_000_000 * (1 + seed) + size)
        entropy, largest = 0.0, 0
        right: dict[str, int] = dict.fromkeys(temperatures, 0)
        outputs: dict[str, list[Tensor]] = {name: [] for name in temperatures}
        sets = max(min(settings.sets, settings.items // size), 1)
        for count in _batches(sets, size):
            *inputs, answers = draw(size, count, generator)
            projected = model.project(*inputs)
            logits = model.logits(*projected[:2])
            entropy += float(torch.special.entr(logits.softmax(-1)).sum())
            if draw is max_retrieval:
                largest += int((logits.argmax(-1) == inputs[0][..., 0].argmax(-1)).sum())
            for name, temperature in temperatures.items():
                outputs[name].append(z := model.attend(*projected, temperature))
                right[name] += int((model.predict(model.out(z)).argmax(-1) == answers).sum())
        for name, result in out.items():
            z = torch.cat(outputs[name])
            result["accuracy"].append(round(right[name] / sets, 5))
            for what, value in (("deviation", z.std(0).mean()), ("spread", z.std(1, correction=0).mean()), ("mean", z.mean())):
                result[what].append(round(float(value), 6))
        attention["entropy"].append(round(entropy / sets, 5))
        attention["largest"].append(round(largest / sets, 5))
    if draw is not max_retrieval:
        del attention["largest"]
    return out | {"attention": attention}


def _batches(sets: int, size: int) -> list[int]:
    most = max(CHUNK // size, 1)
    return [min(most, sets - first) for first in range(0, sets, most)]


def run_sets(make: Callable[[str, Settings], tuple[SetModel, Draw]], run: Run) -> dict[str, Any]:
    settings = run.settings
    torch.manual_seed(run.seed)
    norm, _, otherwise = run.variant.partition("-")
    model, draw = make(norm, settings)
    l2 = None
    if hasattr(settings, "l2"):
        l2 = 0.0 if otherwise == "no_l2" else settings.l2
        if otherwise != "torch_start":
            start_as_flax(model)
    probes = draw(settings.largest, settings.batch, torch.Generator().manual_seed(3_000_000 + run.seed))[:-1]
    spreads: list[list[float]] = []

    def watch(step: int) -> None:
        if step in SPREAD_AT or step == settings.steps:
            spreads.append([step, *(round(x, 4) for x in spread_and_bound(model, *probes))])

    loss = train(model, draw, settings, run.seed, l2, watch)
    temperatures = {"plain": None, "adaptive": AdaptiveTemperature()}
    fitted = None
    if draw is max_retrieval and run.variant == "baseline":
        fitted = refit(model, settings, run.seed)
        temperatures |= {"refit": fitted}
    squares = sum(float(p.detach().square().sum()) for p in model.parameters())
    result: dict[str, Any] = {"loss": round(loss, 5), "sizes": list(settings.sizes), "spread": spreads}
    result["weight_norm"] = round(squares**0.5, 3)
    result |= by_size(model, draw, temperatures, settings, run.seed)
    return result | ({} if fitted is None else {"coefficients": list(fitted.coefficients)})


RETRIEVAL, LOOKUP = (functools.partial(run_sets, make) for make in (argmax_model, dictionary_model))
TWO = ("baseline", "layer_norm")
#: What each of the two, L2 term and start, does without the other.
APART = ("baseline-no_l2", "baseline-torch_start")
MAX_RETRIEVAL = experiment("max-retrieval", TWO[:1], RETRIEVAL)
ARGMAX = experiment("argmax-retrieval", ("layer_norm", "standardise"), RETRIEVAL)
LONGER = experiment("argmax-retrieval-100k", NORMS, RETRIEVAL)
LARGER = experiment("argmax-retrieval-256", TWO, RETRIEVAL)
IN_LOSS = experiment("argmax-retrieval-l2", (*NORMS, *APART), RETRIEVAL)
IN_LOSS_LONGER = experiment("argmax-retrieval-l2-100k", TWO[:1], RETRIEVAL)
DICTIONARY = experiment("dictionary-lookup", NORMS, LOOKUP)
DICTIONARY_LONGER = experiment("dictionary-lookup-10k", NORMS, LOOKUP)
DICTIONARY_LARGER = experiment("dictionary-lookup-256", TWO, LOOKUP)
SETS = (
    *(MAX_RETRIEVAL, ARGMAX, LONGER, LARGER, IN_LOSS, IN_LOSS_LONGER),
    *(DICTIONARY, DICTIONARY_LONGER, DICTIONARY_LARGER),
)
