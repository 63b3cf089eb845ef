"""Rotated keys beside a KV cache, so that decoding rotates each key once and not at every token.

The cache is its user's. It holds what the model wrote, and whoever reads, crops, reorders, copies or saves it finds that and
nothing else: what is kept here is made of it and can be made again. It serves a pass that begins with the very keys which the
last one left (their storage, written to by nobody, as torch counts writes), or with the first of them, where a draft was
rolled back. Anything else drops it, and it is made again at the second of two steps that follow one another: beams, which
reorder the cache at each step, never pay for it.

Under inference_mode torch counts no writes to the tensors that it makes: there the cache is given the same keys, in the same
memory, as a tensor whose writes are counted.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import Cache, DynamicCache
from transformers.cache_utils import DynamicLayer

from ..core.rotated_keys import RotatedKeys
from .internals import storage_of

#: What it may take for a model, in all caches together.
ROTATED_KEY_BYTES = 2 << 30


class LayerKeys:
    """The keys of one cache layer, rotated or normalised, and what identifies the keys that they were made of.

    Args:
        by: what they are turned by.
        key: the keys that the cache holds.
    """

    def __init__(self, by: Hashable, key: Tensor) -> None:
        self.by, self.turned = by, RotatedKeys()
        self.serves = False  # whether the pass that runs may use it
        self.note(key)

    def note(self, key: Tensor) -> None:
        """Take note of the keys that the cache holds."""
        self.storage, self.version = StorageWeakRef(key.untyped_storage()), key._version
        self.shape, self.length, self.stride = key.shape[:2], key.shape[2], key.stride()
        self.follows = False  # whether the pass that runs began with these keys

    def begin(self, key: Any) -> bool:
        """Tell whether a pass begins with the keys that were noted, or the first of them, to which the notes are then cut."""
        same = (
            type(key) is Tensor
            and not key.is_inference()  # as after a copy, or another who writes the cache
            and storage_of(key) == self.storage.cdata
            and (key._version, key.shape[:2], key.stride(), key.storage_offset()) == (self.version, self.shape, self.stride, 0)
            and key.shape[2] <= self.length
        )
        if same and key.shape[2] < self.length:
            self.length = key.shape[2]
            self.turned.crop(self.length)
        self.follows = same
        return same


def drop_other_keys(kept: dict[int, LayerKeys], cache: Cache) -> None:
    """Drop what was made of keys that the cache holds no longer, as a forward pass begins.

    Args:
        kept: by the number of the layer.
    """
    held = len(cache.layers)
    for n, own in list(kept.items()):
        if n >= held or not own.begin(getattr(cache.layers[n], "keys", None)):
            del kept[n]


def kept_keys(
    cache: Any,
    caches: WeakKeyDictionary[Cache, dict[int, LayerKeys]],
    number: int | None,
    q_len: int,
    by: Hashable,
    key: Tensor,
) -> RotatedKeys | None:
    """Return the kept keys of a layer; None: they are not a plain dynamic cache's on a CPU, or are met for the first time.

    Args:
        cache: the pass's, or None.
        caches: what the model keeps beside each cache, by the number of the layer.
        number: the layer's in the cache.
        q_len: how many keys the pass wrote.
        by: what the keys are turned by.
    """
    if type(cache) is not DynamicCache or cache.offloading or number is None or number >= len(cache.layers):
        return None
    layer = cache.layers[number]
    if type(layer) is not DynamicLayer or layer.keys is not key or type(key) is not Tensor or key.device.type != "cpu":
        return None
    if key.is_inference():
        layer.keys = key = _counted(key)
    if (kept := caches.get(cache)) is None:
        kept = caches[cache] = {}
    own = kept.get(number)
    if own is None or own.by != by:
        kept[number] = LayerKeys(by, key)
        return None
    if own.follows or storage_of(key) != own.storage.cdata:
        own.serves = own.follows and key.shape[2] == own.length + q_len
        if own.serves and not own.turned.nbytes:
            taken = list(caches.data.values())  # type: ignore[attr-defined]  # in one step: other threads may add caches
            own.serves = sum(map(nbytes_of, taken)) + key.nbytes <= ROTATED_KEY_BYTES
        own.note(key)
    return own.turned if own.serves else None


def nbytes_of(kept: dict[int, LayerKeys]) -> int:
    """The bytes of what is kept beside one cache."""
    return sum(own.turned.nbytes for own in list(kept.values()))


def _counted(key: Tensor) -> Tensor:
    """Return a view of the same memory, as a tensor that counts writes."""
    with torch.inference_mode(False):
        return torch.utils.dlpack.from_dlpack(key)
