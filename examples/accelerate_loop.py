"""Fine-tune on a text in your own loop, with accelerate."""

from __future__ import annotations

import itertools

from accelerate import Accelerator
from peft import get_peft_model
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling

from common import options, prepared, texts

args = options(__doc__)
model, tokenizer, adapter = prepared(args)
model, accelerator = get_peft_model(model, adapter), Accelerator()
data = [tokenizer(text, truncation=True, max_length=args.length) for text in texts(args.data)]
batches = DataLoader(data, batch_size=4, shuffle=True, collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm=False))
model, optimizer, batches = accelerator.prepare(model, AdamW(model.parameters(), lr=1e-4), batches)
for batch in itertools.islice(itertools.chain.from_iterable(itertools.repeat(batches)), args.steps):
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.3f}")
accelerator.unwrap_model(model).save_pretrained(args.output)
