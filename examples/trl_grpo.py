"""Reinforce what the model writes, by TRL's GRPOTrainer: here short answers are better. --data is not used.

The reference model is the base without the adapter and without its method.
"""

from __future__ import annotations

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from common import DEVICE, options, prepared

args = options(__doc__)
model, tokenizer, adapter = prepared(args)


def brevity(completions: list[str], **_: object) -> list[float]:
    return [-float(len(text)) for text in completions]


arguments = GRPOConfig(
    args.output,
    max_steps=args.steps,
    num_generations=4,
    per_device_train_batch_size=4,
    max_completion_length=32,
    beta=0.04,
    learning_rate=1e-4,
    logging_steps=5,
    **DEVICE,
)
data = Dataset.from_dict({"prompt": ["What is a lighthouse?", "Name a bird.", "Count to three.", "Who are you?"] * 8})
trainer = GRPOTrainer(model, brevity, arguments, train_dataset=data, processing_class=tokenizer, peft_config=adapter)
trainer.train()
trainer.save_model()
