#!/usr/bin/env python3
"""PyTorch baseline of a small Llama on the bytes of a text, with transformers' own model and AdamW.

    torch_llama.py input.txt

12 layers of 256, 8 heads, MLP of 704 (9.7 million parameters), context 128, batch 8; AdamW with betas 0.9 and 0.95,
weight decay 0.1, clipping at 1, learning rate 1e-3 after 40 steps of warmup, cosine to 1e-4. The last twentieth of the
text is the validation split. Prints one JSON line: step_s (median), stepping_s, total_s, and val_loss in nats per byte
over the whole validation split, in windows of the context that do not overlap.
Needs: pip install torch transformers numpy
"""

import time

started = time.perf_counter()

import numpy as np
import torch
from gpt import adamw, compiled, peak_rss_bytes, report
from recipe import Recipe, arguments, half
from transformers import LlamaConfig, LlamaForCausalLM

RECIPE = Recipe(context=128, batch=8, warmup=40)
VOCABULARY = 259


class Loss(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs, targets):
        logits = self.model(input_ids=inputs, use_cache=False).logits.float()
        return torch.nn.functional.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))


def main():
    a = arguments(__doc__, steps=300)
    text = torch.from_numpy(np.fromfile(a.text, dtype=np.uint8).astype(np.int64))
    cut = int(len(text) * 0.95)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=704, num_hidden_layers=12, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=RECIPE.context, tie_word_embeddings=False,
        attn_implementation="sdpa")
    model = Loss(LlamaForCausalLM(config))
    optimizer = adamw(model, lr=RECIPE.rate, betas=(0.9, 0.95), weight_decay=0.1)
    trained = RECIPE.train(compiled(model, a.mode), optimizer, text[:cut], a)
    with half(a):
        val_loss = RECIPE.whole_split_loss(model, text[cut:], rows=RECIPE.batch)
    report(**trained, val_loss=val_loss, total_s=time.perf_counter() - started, peak_rss_bytes=peak_rss_bytes())


if __name__ == "__main__":
    main()
