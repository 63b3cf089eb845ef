"""What only a GPU can tell: `python lab/speed/gpu.py PART`, or all parts, one line `ROW {json}` for each thing
measured, behind a line `ON {json}` with the GPU and the versions.

    exactness    every method in float32 against the CPU: one pass, cache, padding, packing, generate, training, what capture
                 measures; then bfloat16
    short        prompts of 7 to 1,000 tokens and a training step in bfloat16, at several head_dims: whether they run
    static       generate with a static cache, which transformers compiles, and torch.compile(model), against plain generate
    whole        layers of Llama 3 8B's shape: a prompt and a decoded token; unmodified, method, unmodified in turn
    step         a decoded token of the same by the clock, 16 at a time, in turn with the unmodified model
    attention    attention alone beside scaled_dot_product_attention, forward, and forward and backward
    tiles        the Triton kernels with tiles of other sizes

`--device cpu` runs the same small, as a check of itself. Exactness takes a minute for each method where nothing is compiled
yet: give `--methods`, and run several beside one another. lab/speed/gpu_rows.py takes the lines into results/gpu.json.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import logging

import hf_longattn
from hf_longattn import LongAttnConfig, Rotation
from hf_longattn.core.geometry import AttentionLayout
from hf_longattn.core.kernels import triton as launcher
from hf_longattn.core.kernels.kernel import KernelCall
from hf_longattn.core.kernels.triton import TileSizes
from hf_longattn.core.plan import LogitSpec
from hf_longattn.integration.caches import CACHE
from lab.speed.gpu_kit import (
    UNMODIFIED,
    counts,
    in_turn,
    kernel_ms,
    methods,
    milliseconds,
    model,
    peak_mib,
    say,
    say_machine,
    saying,
    tensors,
    under,
)

Args = argparse.Namespace
FEW = ("infoscale", "scale_invariant", "rerope", "adaptive_temperature")
SDPA = "sdpa"


def half(args: Args) -> torch.dtype:
    return torch.float32 if args.device == "cpu" else torch.bfloat16


# exactness, short, static ---------------------------------------------------------------------------------------------


def exactness(args: Args) -> None:
    for name in args.methods or [UNMODIFIED, *methods(64)]:
        with torch.no_grad():
            for what, measured in cases(name, args.device):
                with saying({"part": "exactness", "method": name, "what": what}) as row:
                    row["err"] = measured()


def cases(name: str, device: str) -> Iterator[tuple[str, Callable[[], float]]]:
    """What is run, and its largest difference from the CPU's result, relative to the largest value of that."""
    shape = {"hidden_size": 512, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "initializer_range": 0.04, "tie_word_embeddings": False}
    cpu = under(model(64, torch.float32, "cpu", **shape), name, 64)
    own = under(model(64, torch.float32, "cpu", **shape), name, 64).to(device)
    length, prompt = 300, 200
    ids = torch.randint(3, 97, (1, length), generator=torch.Generator().manual_seed(1))
    two = torch.cat([ids, torch.cat([torch.zeros(1, 40, dtype=torch.long), ids[:, :-40]], 1)])
    mask = (two > 0).long()
    padded = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    packed = {"position_ids": torch.cat([torch.arange(n) for n in (120, 100, 80)])[None]}
    want = cpu(ids, use_cache=False).logits

    def there(x: Any) -> Any:
        return {k: v.to(device) for k, v in x.items()} if isinstance(x, dict) else x.to(device)

    def off(got: Tensor, exact: Tensor) -> float:
        return float((got.float().cpu() - exact).abs().max() / exact.abs().max())

    def one_pass(tokens: Tensor, seen: Tensor | None = None, **kwargs: Any) -> float:
        got, exact = own(there(tokens), use_cache=False, **there(kwargs)).logits, cpu(tokens, use_cache=False, **kwargs).logits
        return off(got, exact) if seen is None else off(got.cpu()[seen], exact[seen])

    def pieces(*ends: int) -> float:
        cache, found = {}, []
        for start, end in zip((0, *ends), ends, strict=False):
            out = own(there(ids[:, start:end]), use_cache=True, **cache)
            cache = {CACHE: out[CACHE]}
            found.append(out.logits)
        return off(torch.cat(found[1:], 1), want[:, ends[0] :])

    def generated(**kwargs: Any) -> float:
        asked: Any = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        got, exact = own.generate(there(ids[:, :prompt]), **asked, **kwargs), cpu.generate(ids[:, :prompt], **asked)
        return off(torch.stack(got.logits), torch.stack(exact.logits))

    def trained() -> float:
        grads = []
        for built, x in ((own, there(ids)), (cpu, ids)):
            built.train()
            with torch.enable_grad():
                built(x, labels=x, use_cache=False).loss.backward()
            grads.append(built.model.layers[0].self_attn.q_proj.weight.grad.cpu())
            built.zero_grad()
            built.eval()
        return off(grads[0], grads[1])

    def measured() -> float:
        entropies = []
        for built, x in ((own, there(ids)), (cpu, ids)):
            with hf_longattn.capture(built, what=("entropy", "outputs"), rows=64) as seen:
                built(x, use_cache=False)
            entropies.append(seen.result()["entropy"].nan_to_num())
        return off(entropies[0], entropies[1])

    def in_half(run: Callable[[], float]) -> float:
        own.to(torch.bfloat16)
        return run()

    yield "prefill", lambda: one_pass(ids)
    yield "decode", lambda: pieces(*range(290, length + 1))
    yield "padded", lambda: one_pass(two, mask.bool(), **padded)
    yield "train", trained
    yield "packed", lambda: one_pass(ids, **packed)
    yield "chunks", lambda: pieces(75, 150, 225, length)
    yield "generate", generated
    yield "static", lambda: generated(cache_implementation="static", disable_compile=True)
    yield "measured", measured
    yield "bfloat16", lambda: in_half(lambda: one_pass(ids))
    yield "bfloat16 decode", lambda: in_half(lambda: pieces(298, 299, length))


def short(args: Args) -> None:
    small = args.device == "cpu"
    for head_dim in (16,) if small else (64, 128, 256):
        shape = {"hidden_size": 4 * head_dim, "head_dim": head_dim, "intermediate_size": 64, "num_hidden_layers": 1}
        shape |= {"num_attention_heads": 4, "num_key_value_heads": 2}
        for name in args.methods or methods(4096):
            built = under(model(4096, half(args), args.device, **shape), name, 4096)
            for length in (7, 33, 100, 128, 200, 1000):
                for pad in (False, True):
                    about = {"method": name, "head_dim": head_dim, "length": length, "pad": pad}
                    with saying({"part": "short", **about}) as row:
                        row["ok"] = runs(built, length, pad)


def runs(built: Any, length: int, pad: bool) -> bool:
    """A prompt, a token behind it and a training step give numbers."""
    ids = torch.randint(3, 97, (2, length), device=built.device)
    mask = torch.ones_like(ids)
    mask[0, : 3 * pad] = 0
    with torch.no_grad():
        out = built(ids, attention_mask=mask, use_cache=True)
        longer = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        token = built(ids[:, :1], attention_mask=longer, **{CACHE: out[CACHE]})
    built.zero_grad()
    built(ids, attention_mask=mask, labels=ids, use_cache=False).loss.backward()
    grad = built.model.layers[0].self_attn.q_proj.weight.grad
    return all(bool(x.isfinite().all()) for x in (out.logits, token.logits, grad))


def static(args: Args) -> None:
    shape = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 128, "num_hidden_layers": 2, "initializer_range": 0.05}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    new = 12
    for name in args.methods or [UNMODIFIED, *FEW]:
        built = under(model(128, torch.float32, args.device, **shape), name, 128)
        ids = torch.randint(3, 97, (1, 300), device=args.device)

        def generated(built: Any = built, ids: Tensor = ids, **kwargs: Any) -> Tensor:
            asked = {"max_new_tokens": new, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
            return torch.stack(built.generate(ids, **asked, **kwargs).logits)

        want = generated()
        for what, kwargs in (("dynamic", {}), ("static compiled", {"cache_implementation": "static"})):
            with saying({"part": "static", "method": name, "what": what}) as row:
                row["err"] = float((generated(**kwargs) - want).abs().max())
                row["ms_a_token"] = round(milliseconds(lambda k=kwargs, g=generated: g(**k), args.device, 3) / new, 2)
        with saying({"part": "static", "method": name, "what": "torch.compile(forward)"}) as row, torch.no_grad():
            compiled = torch.compile(built.forward)
            row["err"] = float((compiled(ids, use_cache=False).logits - built(ids, use_cache=False).logits).abs().max())


# whole ----------------------------------------------------------------------------------------------------------------


def llama(args: Args) -> tuple[Any, int, int]:
    """Layers of Llama 3 8B's shape, what they count as trained at, and the length of a prompt."""
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": args.layers, "num_attention_heads": 32}
    shape |= {"num_key_value_heads": 8, "vocab_size": 1024}
    trained, length = 8192, args.length or 8192
    if args.device == "cpu":
        shape |= {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        shape |= {"num_key_value_heads": 2}
        trained, length = 64, 256
    return model(trained, half(args), args.device, **shape), trained, length


def whole(args: Args) -> None:
    """One set of weights: a method is put in and taken out."""
    built, trained, length = llama(args)
    about = {"length": length, "layers": built.config.num_hidden_layers}
    asked = args.methods or list(methods(trained))
    for now in [UNMODIFIED, *(name for method in asked for name in (method, UNMODIFIED))]:
        if now != UNMODIFIED:
            under(built, now, trained)
        with saying({"part": "whole", "method": now, **about}) as row, torch.inference_mode():
            read_and_write(built, length, args.device, row)
        if now != UNMODIFIED:
            hf_longattn.remove(built)


def read_and_write(built: Any, length: int, device: str, row: dict[str, Any]) -> None:
    """A prompt and a token behind it: milliseconds, MiB beyond the weights, what the token asks of the device."""
    ids = torch.randint(3, built.config.vocab_size, (1, length), device=device)

    def read() -> Any:
        return built(ids, use_cache=True, logits_to_keep=1)[CACHE]

    row["prefill_ms"], row["prefill_mib"] = milliseconds(read, device, 3), peak_mib(read, device)
    cache = read()

    def step() -> None:
        built(ids[:, :1], **{CACHE: cache})

    step()
    row["step_mib"], row["step_ms"] = peak_mib(step, device), milliseconds(step, device, 14)
    row |= counts(step, device)


def step(args: Args) -> None:
    """Two models of the same weights, each with a cache of its own: no length is visited twice, since what torch, cuDNN and
    cuBLAS choose for a length is kept for the next visit."""
    built, trained, length = llama(args)
    twin, _, _ = llama(args)
    twin.load_state_dict(built.state_dict(), assign=True)
    ids = torch.randint(3, built.config.vocab_size, (1, length), device=args.device)
    apart = 0 if args.device == "cpu" else 96
    for n, name in enumerate(args.methods or methods(trained)):
        under(twin, name, trained)
        ends = length - apart * n, length * 3 // 4 - apart * n
        about = {"method": name, "length": ends[1], "base_length": ends[0], "layers": built.config.num_hidden_layers}
        with saying({"part": "step", **about}) as row, torch.inference_mode():
            prompts = (ids[:, :end] for end in ends)
            caches = [m(x, use_cache=True, logits_to_keep=1)[CACHE] for m, x in zip((built, twin), prompts, strict=True)]

            def token(which: int, caches: list[Any] = caches) -> None:
                (built, twin)[which](ids[:, :1], **{CACHE: caches[which]})

            turns = [(which, milliseconds(lambda w=which: token(w), args.device, 16)) for _ in range(4) for which in (0, 1)]
            row["base_ms"], row["wall_ms"] = ([ms for w, ms in turns[2:] if w == which] for which in (0, 1))
            row["ratio"] = round(statistics.median(row["wall_ms"]) / statistics.median(row["base_ms"]), 2)
            row |= {"base_kernels_ms": kernel_ms(lambda: token(0), args.device)}
            row |= {"kernels_ms": kernel_ms(lambda: token(1), args.device)}
        hf_longattn.remove(twin)


# attention, tiles -----------------------------------------------------------------------------------------------------


def attention(args: Args) -> None:
    small = args.device == "cpu"
    length, head_dim = (256, 16) if small else (args.length or 16384, args.head_dim)
    heads, kv_heads = (4, 2) if small else (32, 8)
    turn = Rotation(10_000.0 ** (-torch.arange(0, head_dim, 2, device=args.device).float() / head_dim))
    apart = tensors(length, heads, kv_heads, head_dim, half(args), args.device)
    grad = torch.randn_like(apart[0])
    taped = [x.clone().requires_grad_() for x in apart]
    for name in args.methods or methods(length // 4):
        config = LongAttnConfig.preset(name, **methods(length // 4)[name])

        def own(q: Tensor, k: Tensor, v: Tensor, config: LongAttnConfig = config) -> Tensor:
            return hf_longattn.attention(q, k, v, config, rotation=turn)

        about = {"method": name, "length": length, "head_dim": head_dim, "heads": heads, "kv_heads": kv_heads}
        with saying({"part": "attention", **about}) as row:
            with torch.no_grad():
                mine, peer = in_turn(lambda f=own: f(*apart), lambda: plain(*apart), args.device)
                row |= {"forward_ms": mine, "sdpa_ms": peer, "forward": round(mine / peer, 2)}
                row |= {"kernels_ms": kernel_ms(lambda f=own: f(*apart), args.device)}
                row |= {"sdpa_kernels_ms": kernel_ms(lambda: plain(*apart), args.device)}
                row |= {
                    "mib": peak_mib(lambda f=own: f(*apart), args.device),
                    "sdpa_mib": peak_mib(lambda: plain(*apart), args.device),
                }
            mine, peer = in_turn(lambda f=own: f(*taped).backward(grad), lambda: plain(*taped).backward(grad), args.device)
            row |= {"both_ms": mine, "sdpa_both_ms": peer, "both": round(mine / peer, 2)}
            row["both_mib"] = peak_mib(lambda f=own: f(*taped).backward(grad), args.device)


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def tiles(args: Args) -> None:
    """What the launcher would choose from is replaced; with a map scale_invariant's, and plain."""
    small = args.device == "cpu"
    length, dim = (128, 16) if small else (args.length or 16384, args.head_dim)
    heads, kv_heads = (2, 1) if small else (32, 8)
    apart = tensors(length, heads, kv_heads, dim, half(args), args.device)
    rows = AttentionLayout.causal(length, length, None, 0, torch.device(args.device))
    square = 2 * torch.log1p(torch.arange(2 * length + 512, device=args.device).double() / 10) + 1
    table = {"gain": square.sqrt()[None].float().contiguous(), "bias": (1 - square)[None].float().contiguous()}
    sizes = [TileSizes(r, c, w, s) for r, c, w in ((128, 128, 8), (128, 64, 8), (128, 64, 4), (64, 64, 4)) for s in (2, 3)]
    sizes += [TileSizes(32, 128, 8, 3), TileSizes(32, 64, 4, 2)]
    own, grad = launcher._candidates, torch.randn_like(apart[0])
    for kind, spec in (
        ("map", LogitSpec(dim**-0.5, None, *table.values())),
        ("plain", LogitSpec(dim**-0.5, None, None, None)),
    ):
        for mode in ("forward", "entropy", "backward"):
            q, k, v = (x.clone().requires_grad_(mode == "backward") for x in apart)

            def back(out: Tensor, mode: str = mode) -> None:
                if mode == "backward":
                    out.backward(grad)

            def run(q: Any = q, k: Any = k, v: Any = v, mode: str = mode, spec: LogitSpec = spec, back: Any = back) -> None:
                entropy = mode == "entropy"
                back(
                    launcher.run(KernelCall(q, k, None if entropy else v, rows, spec, with_lse=True, with_entropy=entropy))[0]
                )

            about = {"part": "tiles", "head_dim": dim, "mode": mode, "kind": kind}
            peer = milliseconds(lambda q=q, k=k, v=v, back=back: back(plain(q, k, v)), args.device)
            say(**about, tiles=SDPA, ms=peer)
            for blocks in sizes if launcher.why_not_triton(q) is None else []:
                for kernel in ("query", "key") if mode == "backward" else ("forward",):
                    chosen = {kernel: blocks}
                    launcher._candidates = lambda name, *a, c=chosen: (c.get(name) or own(name, *a)[0],)
                    launcher._FAILED.clear()
                    launcher._warn.cache_clear()
                    with saying(about | {"kernel": kernel, "tiles": str(tuple(blocks))}) as row, warnings.catch_warnings():
                        warnings.simplefilter("error")  # plain PyTorch takes over with a warning
                        row["ms"] = milliseconds(run, args.device)
                        row["ratio"] = round(row["ms"] / peer, 2)
    launcher._candidates = own


PARTS: dict[str, Callable[[Args], None]] = {
    **{"exactness": exactness, "short": short, "static": static},
    **{"whole": whole, "step": step, "attention": attention, "tiles": tiles},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=list(PARTS), help="all of them without")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--length", type=int, help="of whole, step, attention and tiles")
    parser.add_argument("--head-dim", type=int, default=128, help="of attention and tiles")
    parser.add_argument("--layers", type=int, default=16, help="of the whole model")
    args = parser.parse_args()
    logging.set_verbosity_error()
    warnings.simplefilter("ignore", hf_longattn.UntrainedWarning)
    if args.device == "cuda":
        say_machine()
    for part in [args.part] if args.part else PARTS:
        PARTS[part](args)


if __name__ == "__main__":
    main()
