"""Pictures between text: a tiny LLaVA under rerope in vLLM, beside transformers; adds a row to docs/vllm.json.

.venv-vllm/bin/python tests/vllm_engine/pictures.py
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "kit")]

import numpy  # noqa: E402
import tiny  # noqa: E402
import torch  # noqa: E402
from cases import CASES, model_config  # noqa: E402
from PIL import Image  # noqa: E402
from run import WIDE, WORK, keep, wrong  # noqa: E402
from serve import ENVIRONMENT, PAGE  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForImageTextToText,
    AutoProcessor,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

import hf_longattn  # noqa: E402

FOLDER, ANSWERS = WORK / "rerope-on-llava", WORK / "pictures.json"
TEXTS = ("About <image> this, and what it means to all of us.", "<image> a <image> b: which is the larger one of both?")


def checkpoint() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    vision = CLIPVisionConfig(hidden_size=64, intermediate_size=64, **layers)
    text = model_config("llama", **WIDE, vocab_size=len(tokenizer))
    torch.manual_seed(0)
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=4,
    )
    hf_longattn.save(hf_longattn.apply(LlavaForConditionalGeneration(config).eval(), CASES["rerope"]), FOLDER)
    sizes = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    how = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    LlavaProcessor(sizes, tokenizer, image_token="<image>", **how).save_pretrained(FOLDER)


def pictures(text: str) -> list[Any]:
    rng = numpy.random.default_rng(0)
    return [Image.fromarray(rng.integers(0, 255, (28, 28, 3), dtype=numpy.uint8)) for _ in range(text.count("<image>"))]


def serve() -> None:
    """What vLLM answers: the prompt's tokens, new ones, and the log probabilities of all but the first."""
    from vllm import LLM, SamplingParams

    llm = LLM(str(FOLDER), dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=4, block_size=PAGE)
    sampling = SamplingParams(max_tokens=8, temperature=0, prompt_logprobs=0, logprobs=1, ignore_eos=True)
    asked = [{"prompt": text, "multi_modal_data": {"image": pictures(text)}} for text in TEXTS]
    found = []
    for answer in llm.generate(asked, sampling, use_tqdm=False):
        prompt, new = list(answer.prompt_token_ids), list(answer.outputs[0].token_ids)
        seen = [*answer.prompt_logprobs[1:], *answer.outputs[0].logprobs]
        found.append([prompt, new, [d[t].logprob for d, t in zip(seen, prompt[1:] + new, strict=True)]])
    ANSWERS.write_text(json.dumps(found), encoding="utf-8")


@torch.no_grad()
def compare() -> dict[str, Any]:
    model, processor = AutoModelForImageTextToText.from_pretrained(FOLDER).eval(), AutoProcessor.from_pretrained(FOLDER)
    worst, equal, answers = 0.0, 0, json.loads(ANSWERS.read_text(encoding="utf-8"))
    for text, (prompt, new, served) in zip(TEXTS, answers, strict=True):
        given = processor(text=text, images=pictures(text), return_tensors="pt")
        assert given["input_ids"][0].tolist() == prompt
        ids = torch.tensor([prompt + new])
        own = model(input_ids=ids, pixel_values=given["pixel_values"], use_cache=False).logits[0, :-1].log_softmax(-1)
        worst = max(worst, float((own.gather(1, ids[0, 1:, None])[:, 0] - torch.tensor(served)).abs().max()))
        equal += bool((own[len(prompt) - 1 :].argmax(-1) == torch.tensor(new)).all())
    counts = {"largest": float(f"{worst:.1e}"), "requests": len(answers), "greedy": equal}
    return {"case": "rerope", "model": "llava", "engine": "pictures", "scenario": "pictures"} | counts


if __name__ == "__main__":
    os.environ |= ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if sys.argv[1:]:  # vLLM's classes and transformers' need processes of their own
        row = compare()
        print(row)
        keep("pictures", [row], None)
        sys.exit(wrong(row))
    WORK.mkdir(exist_ok=True)
    checkpoint()
    serve()
    os.execv(sys.executable, [sys.executable, __file__, "compare"])
