#!/usr/bin/env python3
"""PyTorch baseline of a small Llama on the bytes of a text, with transformers' own model and AdamW.

    torch_llama.py input.txt

12 layers of 256, 8 heads, MLP of 704 (9.7 million parameters), context 128, batch 8; AdamW with betas 0.9 and 0.95,
weight decay 0.1, clipping at 1, learning rate 1e-3 after 40 steps of warmup, cosine to 1e-4. The last twentieth of the
text is the validation split. Prints one JSON line: step_s (median), stepping_s, total_s, and val_loss in nats per byte
over the whole validation split, in windows of the context that do not overlap.
Needs: pip install torch transformers numpy
"""

import argparse
import math
import os
import statistics
import time

started = time.perf_counter()

import numpy as np
import torch
from gpt import compiled, peak_rss_bytes, report
from transformers import LlamaConfig, LlamaForCausalLM

CONTEXT, BATCH, WARMUP, LR_MAX, LR_MIN = 128, 8, 40, 1e-3, 1e-4
VOCABULARY = 259


def learning_rate(step, steps):
    if step < WARMUP:
        return LR_MAX * (step + 1) / (WARMUP + 1)
    progress = (step - WARMUP) / (steps - WARMUP)
    return LR_MIN + 0.5 * (1 + math.cos(math.pi * progress)) * (LR_MAX - LR_MIN)


class Loss(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs, targets):
        logits = self.model(input_ids=inputs, use_cache=False).logits.float()
        return torch.nn.functional.cross_entropy(logits.view(-1, VOCABULARY), targets.reshape(-1))


@torch.no_grad()
def whole_split_loss(model, ids):
    windows = (len(ids) - 1) // CONTEXT
    inputs = ids[: windows * CONTEXT].view(windows, CONTEXT)
    targets = ids[1 : windows * CONTEXT + 1].view(windows, CONTEXT)
    total = sum(model(x, y).item() * x.numel() for x, y in zip(inputs.split(BATCH), targets.split(BATCH)))
    return total / (windows * CONTEXT)


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("text")
    cli.add_argument("--steps", type=int, default=400)
    cli.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    cli.add_argument("--mode", choices=["eager", "compile", "max-autotune"], default="eager")
    cli.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    cli.add_argument("--seed", type=int, default=1337)
    a = cli.parse_args()

    torch.set_num_threads(a.threads)
    torch.manual_seed(a.seed)
    generator = torch.Generator().manual_seed(a.seed)
    text = torch.from_numpy(np.fromfile(a.text, dtype=np.uint8).astype(np.int64))
    cut = int(len(text) * 0.95)
    train, validation = text[:cut], text[cut:]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    model = Loss(LlamaForCausalLM(config))
    run = compiled(model, a.mode)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR_MAX, betas=(0.9, 0.95), fused=True)
    autocast = lambda: torch.autocast("cpu", dtype=torch.bfloat16, enabled=a.dtype == "bf16")

    times = []
    stepping = time.perf_counter()
    for step in range(a.steps):
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, a.steps)
        begins = torch.randint(len(train) - CONTEXT, (BATCH, 1), generator=generator)
        window = train[begins + torch.arange(CONTEXT + 1)]
        with autocast():
            loss = run(window[:, :-1], window[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        times.append(time.perf_counter() - start)
    stepping = time.perf_counter() - stepping
    with autocast():
        val_loss = whole_split_loss(run, validation)
    report(
        step_s=statistics.median(times),
        stepping_s=stepping,
        total_s=time.perf_counter() - started,
        val_loss=val_loss,
        parameters=sum(p.numel() for p in model.parameters()),
        peak_rss_bytes=peak_rss_bytes(),
    )


if __name__ == "__main__":
    main()
