"""Fine-tune on a text by TRL's SFTTrainer."""

from __future__ import annotations

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from common import DEVICE, options, prepared, texts

args = options(__doc__)
model, tokenizer, adapter = prepared(args)
# TRL's default packing strategy drops what is longer than max_length
arguments = SFTConfig(
    args.output,
    max_length=args.length,
    packing=True,
    packing_strategy="wrapped",
    max_steps=args.steps,
    learning_rate=1e-4,
    logging_steps=5,
    **DEVICE,
)
data = Dataset.from_dict({"text": texts(args.data)})
trainer = SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer, peft_config=adapter)
trainer.train()
trainer.save_model()
