"""The verdict of an evaluation in a sentence: the setting to take, and its cost."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from .readings import COPIES, PROBE, Interval, Readings
from .report import Section, Table
from .rows import Row
from .settings import UNMODIFIED
from .statistics import TOLERANCE, mean_interval

_BY_DESIGN = (
    "By design, clamped temperatures, windows and position remaps change nothing at the lengths that they leave alone."
)


def verdict(results: Readings) -> list[Section]:
    """The settings, best first, if there is something to choose between."""
    if len(ranking := ranked(results)) < 2:
        return []
    heads = [text for text, _, _ in judged(results, UNMODIFIED)]
    rows, tones = [], []
    for s in ranking:
        about = [(sign, found) for _, sign, found in judged(results, s) if found]
        rows.append([s, *("0" if s == UNMODIFIED else signed(found) for _, found in about)])
        tones.append([0, *(tone(sign, found) for sign, found in about)])
    open_ = [s for s in results.settings if s not in ranking]
    text = (
        "Differences from the unmodified model in nats per token, paired by document, ± 95 % interval. A cost above zero "
        "is harm, a gain above zero is good. First comes what gains, by more than chance, and costs at most "
        f"{TOLERANCE}, then what gains more than it costs, each by the mean of its gains. Neighbours may differ by chance "
        "alone."
    )
    legend = f"Blue is better and orange worse, by more than chance and by more than {TOLERANCE}."
    note = f"Not measured in full yet: {', '.join(open_)}." if open_ else ""
    table = Table("Best first", ["setting", *heads], rows, note=note, tones=tones, legend=legend, brief=True)
    return [Section("Verdict", text, [table])]


def of_fewer(results: Readings) -> Table:
    """The verdict over the documents that all settings have read, where some have read fewer than others."""
    read = [{r["which"] for r in results.of_documents(s)} for s in results.settings]
    common = set.intersection(*(found for found in read if found))
    result = dataclasses.replace(results, rows=[r for r in results.rows if r["which"] in common])
    title = f"All settings, on {' and '.join(d for d in results.documents if d in common)} alone"
    return dataclasses.replace(verdict(result)[0].tables[0], title=title, brief=False)


def judged(results: Readings, setting: str) -> list[tuple[str, int, Interval | None]]:
    """Return what the verdict is about: a name, the sign of an improvement, and the difference from the unmodified model."""
    out: list[tuple[str, int, Interval | None]] = []
    if results.within:
        out.append((f"cost at {results.within[-1]:,}", -1, results.difference(setting, results.within[-1])))
    if results.lengths and results.lengths[-1] not in results.within:
        out.append((f"gain at {results.lengths[-1]:,}", 1, negative(results.difference(setting, results.lengths[-1]))))
    for task in results.tasks:
        n = max(r["length"] for r in results.rows if r["task"] == task)
        found = results.paired(task, setting, n, functools.partial(results.answers, task=task, length=n))
        out.append((f"{title_of(task).lower()}: gain at {n:,}", 1, negative(found)))
    return out


def ranked(results: Readings) -> list[str]:
    """The settings that are measured in all that the verdict is about, best first.

    First what gains, by more than chance, and costs at most TOLERANCE within the trained length, then what so gains more
    than it costs, then the unmodified model, then the others; the mean of the gains decides, or the cost where nothing else
    was measured.
    """

    def place(setting: str) -> tuple[int, float]:
        found = [(sign, (sign * difference[0], difference[1])) for _, sign, difference in about[setting] if difference]
        gains = [gain for sign, gain in found if sign > 0] or [gain for _, gain in found]
        cost = -math.fsum(gain[0] for sign, gain in found if sign < 0)
        mean = math.fsum(gain[0] for gain in gains) / len(gains)
        if setting == UNMODIFIED:
            return 2, 0.0
        gaining = mean > max(cost, 0.0) and any(gain[0] > 0 and certain(gain) for gain in gains)
        return (int(cost > TOLERANCE) if gaining else 3), -mean

    about = {s: judged(results, s) for s in results.settings}
    whole = [s for s in results.settings if about[s] and all(found for _, _, found in about[s])]
    return sorted(whole, key=place)


def summary(results: Readings) -> str:
    """Say whether a setting helps at the longest length, and what it costs within the trained one."""
    if not results.lengths and not results.tasks:
        return probed(results)
    if not results.lengths:
        return "No losses were measured; what each setting costs on short text is not known from this page."
    longest, others = results.lengths[-1], [s for s in results.settings if s != UNMODIFIED]
    result = {s: d for s in others if (d := results.difference(s, longest))}
    same = [s for s in result if equal(results, s)]
    sentences = []
    if not result:
        sentences.append(f"Only the unmodified model has been measured at {longest:,} tokens yet.")
    changed = [s for s in others if s not in same]
    if there := [s for s in changed if s in result]:
        best = min(there, key=lambda s: result[s][0])
        against = f"{best}, {signed(result[best])} nats per token against the unmodified model"
        lower = result[best][0] < 0
        nothing = "no setting has a lower loss than the unmodified model" + ", by more than chance" * lower
        said = "the lowest loss is that of" if lower and certain(result[best]) else f"{nothing}; nearest is"
        sentences.append(f"At {longest:,} tokens {said} {against}.")
    if same:
        sentences.append(f"Equal to the unmodified model in every loss, to three digits: {', '.join(same)}. {_BY_DESIGN}")
    costs = {s: (d, n) for s in changed for n in results.within if (d := results.difference(s, n))}  # the longest there is
    if costs:
        message = "; ".join(f"{s} {signed(d)} at {n:,}" for s, (d, n) in costs.items())
        sentences.append(f"Within the trained length the loss changes by: {message} tokens.")
    return " ".join(sentences)


def probed(results: Readings) -> str:
    """Say what a probe found at its farthest distance, against the unmodified model."""
    distances = results.lengths_of(PROBE)
    found = {
        s: (copy, text)
        for s in results.settings
        if s != UNMODIFIED and distances
        if (copy := results.probe_difference(s, "copy", distances[-1]))
        if (text := results.probe_difference(s, "text", distances[-1]))
    }
    if not found:
        return ""
    listed = "; ".join(f"{s} {signed(copy)}, other text there {signed(text)}" for s, (copy, text) in found.items())
    said = (
        f"From {distances[-1]:,} tokens back, a passage read again, against the unmodified model: {listed}, in nats a token."
    )
    if chance := [s for s, (copy, _) in found.items() if not certain(copy)]:
        said += f" Of {', '.join(chance)} this may be chance: probe more passages (--passages)."
    return said


def headline(results: Readings) -> str:
    """Name the setting to take, with its price; the summary where no setting is better than the unmodified model."""
    if (whole := results.complete()) is not results:
        return headline(whole)
    return " ".join(filter(None, [_taken(results), by_chance(results), found_by(results)]))


def found_by(results: Readings) -> str:
    """Say how many written answers the best setting found, against the unmodified model; empty where none were asked for.

    Of settings that found equally many that is the one under which the right answers are likeliest.
    """
    sentences = []
    for task in dict.fromkeys(r["task"] for r in results.rows if "written" in r):
        rows = {s: {(r["length"], r["which"]): r for r in results.of(s, task)} for s in results.settings}
        asked = {s: found for s, found in rows.items() if found}
        common = set.intersection(*map(set, asked.values()))
        if len(asked) < 2 or UNMODIFIED not in asked or not common:
            continue
        means = {s: math.fsum(found[q]["score"] for q in common) / len(common) for s, found in asked.items()}
        losses = {s: math.fsum(found[q].get("loss", 0) for q in common) for s, found in asked.items()}
        best = max((s for s in asked if s != UNMODIFIED), key=lambda s: (means[s], -losses[s]))
        mean, half = mean_interval([100 * (asked[best][q]["score"] - asked[UNMODIFIED][q]["score"]) for q in common])
        of_both = ", ".join(f"{s} {means[s]:.0%}" for s in (best, UNMODIFIED))
        difference = f"{mean:+.0f}{'' if math.isnan(half) else f' ± {half:.0f}'} points".replace("-", "−")
        questions = f"{len(common)} question{'s' * (len(common) > 1)}"
        sentences.append(f"Right answers to {questions} ({task}): {of_both}; {difference}.")
        same = [s for s in asked if s != UNMODIFIED and _writes_alike(asked[s], asked[UNMODIFIED])]
        sentences += [f"Equal to the unmodified model in all that they write: {', '.join(same)}. {_BY_DESIGN}"] * bool(same)
    return " ".join(sentences)


def _writes_alike(own: Mapping[Any, Row], base: Mapping[Any, Row]) -> bool:
    """Tell whether two settings' answers to the questions that both were asked are equal, and their losses to three digits."""
    both = [(own[q], base[q]) for q in own if q in base]
    return all(a["written"] == b["written"] and abs(a.get("loss", 0) - b.get("loss", 0)) < 0.0005 for a, b in both)


#: By the number of documents, what so few say; the share is that of t intervals with 1 and 4 degrees of freedom.
_FEW = {
    1: "One document cannot tell what is chance, and has no interval",
    2: "Two documents hardly tell what is chance: five that differ as much would give intervals a seventh as wide",
}


def by_chance(results: Readings) -> str:
    """Say that one or two documents hardly tell what is chance; empty for more, and where nothing was compared."""
    compared = [s for s in results.settings if s != UNMODIFIED and any(found for _, _, found in judged(results, s))]
    read = {r["which"] for s in compared for r in results.of_documents(s)}
    said = _FEW.get(len(read))
    return f"{said}. Read more windows of each text (--windows), or more texts." if said else ""


def _taken(results: Readings) -> str:
    """Name the setting to take, with its price."""
    first, *others = ranked(results) or [UNMODIFIED]
    if first == UNMODIFIED:
        apart = [found for s in others for _, _, found in judged(results, s) if found and not equal(results, s)]
        nothing = bool(apart) and not any(map(certain, apart))
        least = f"{TOLERANCE:g} nats" if all(math.isnan(half) for _, half in apart) else "chance"
        return f"Take the model as it is: no setting differs from it by more than {least}. " * nothing + summary(results)
    against = [f"{text} {signed(found)}" for text, _, found in judged(results, first) if found]
    after = f" Next: {others[0]}." if others and others[0] != UNMODIFIED else ""
    return f"Take {first}. In nats per token, against the unmodified model: {'; '.join(against)}.{after}"


def equal(results: Readings, setting: str) -> bool:
    """Tell whether a setting's losses equal the unmodified model's to the digits that are shown."""
    base = {n: results.losses(UNMODIFIED, n) for n in results.lengths}
    return all(abs(x - base[n].get(d, x)) < 0.0005 for n in base for d, x in results.losses(setting, n).items())


def negative(difference: Interval | None) -> Interval | None:
    return difference and (-difference[0], difference[1])


def certain(difference: Interval) -> bool:
    """Tell whether a difference is more than chance; with one document, whether it is more than TOLERANCE."""
    mean, half = difference
    return abs(mean) > (TOLERANCE if math.isnan(half) else half)


def tone(sign: int, difference: Interval) -> int:
    """1 for better and -1 for worse than the unmodified model; 0 for less than chance (if that is known) or TOLERANCE."""
    mean = difference[0]
    return (abs(mean) > TOLERANCE and certain(difference)) * (1 if mean * sign > 0 else -1)


def signed(difference: Interval) -> str:
    mean, half = difference
    text = f"{mean:+.3f}".replace("-", "−")
    return text if math.isnan(half) else f"{text} ± {half:.3f}"


def title_of(task: str) -> str:
    titles = {
        "needle": "Needle by length and depth",
        "needles": "Three needles",
        "passkey": "Pass key",
        COPIES: "Copies from far back",
    }
    return titles.get(task, task.replace("_", " ").capitalize())
