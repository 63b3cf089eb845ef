"""The papers' retrieval tasks as tensors, for small models without a vocabulary: sets of items, one query, one class.

`max_retrieval` is App. A.2 of Veličković et al. 2024 (and the "argmax retrieval" of Li et al. 2025), `dictionary_lookup`
App. B.1 of Li et al. 2025.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Classes of items; of a dictionary its keys, and classes of its values.
CLASSES, KEYS, VALUES = 10, 16384, 64


def max_retrieval(items: int, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Items with a priority in [0, 1) and a class; the answer is the class of the highest priority.

    Returns:
        features (batch, items, 1 + CLASSES), float32: the priority, then the class one-hot; a query (batch, 1), uniform in
        [0, 1), which the answer does not depend on; the answers (batch,), int64.
    """
    priority = torch.rand(batch, items, generator=generator)
    label = torch.randint(CLASSES, (batch, items), generator=generator)
    query = torch.rand(batch, 1, generator=generator)
    features = torch.cat([priority[..., None], torch.nn.functional.one_hot(label, CLASSES).float()], -1)
    return features, query, label.gather(1, priority.argmax(1, keepdim=True))[:, 0]


def dictionary_lookup(
    items: int, batch: int, generator: torch.Generator, keys: int = KEYS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Items with a key class, drawn without replacement, and a value class; the answer is the value of the query's key.

    Returns:
        key classes (batch, items), value classes (batch, items), query key (batch,), answers (batch,); all int64.

    Raises:
        ValueError: more items than keys.
    """
    if items > keys:
        raise ValueError(f"{items} items need as many different keys; there are {keys}")
    key = torch.stack([torch.randperm(keys, generator=generator)[:items] for _ in range(batch)])
    value = torch.randint(VALUES, (batch, items), generator=generator)
    asked = torch.randint(items, (batch, 1), generator=generator)
    return key, value, key.gather(1, asked)[:, 0], value.gather(1, asked)[:, 0]
