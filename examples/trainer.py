"""Fine-tune on a text by Transformers' Trainer."""

from __future__ import annotations

from peft import get_peft_model
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

from common import options, prepared, texts

args = options(__doc__)
model, tokenizer, adapter = prepared(args)
arguments = TrainingArguments(args.output, max_steps=args.steps, learning_rate=1e-4, logging_steps=5)
data = [tokenizer(text, truncation=True, max_length=args.length) for text in texts(args.data)]
collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
trainer = Trainer(get_peft_model(model, adapter), arguments, collate, train_dataset=data)
trainer.train()
trainer.save_model()
