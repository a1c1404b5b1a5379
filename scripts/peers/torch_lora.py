#!/usr/bin/env python3
"""LoRA with PEFT on a Hugging Face folder, as a baseline of `trainyard train` with fine_tuning.adapter.

    torch_lora.py BASE TOKENS.bin OUT --steps 40     # writes OUT/first and OUT/last, PEFT folders

TOKENS.bin holds int32 tokens, as `trainyard data prepare` writes them for vocabularies above 65,536; sequences are read
in order. Prints one JSON line: losses, step_s (median), trained (parameters), peak_rss_bytes.
"""

import argparse
import json
import os
import statistics
import time


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("base")
    cli.add_argument("tokens")
    cli.add_argument("out")
    cli.add_argument("--full", action="store_true", help="train everything instead of adapters")
    cli.add_argument("--rank", type=int, default=16)
    cli.add_argument("--batch", type=int, default=2)
    cli.add_argument("--seq", type=int, default=512)
    cli.add_argument("--steps", type=int, default=40)
    cli.add_argument("--lr", type=float, default=2e-4)
    cli.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    a = cli.parse_args()

    import numpy
    import torch
    import transformers
    from gpt import peak_rss_bytes
    from peft import LoraConfig, get_peft_model

    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(a.base, dtype=torch.bfloat16, attn_implementation="sdpa")
    if a.full:
        # Masters in f32, products in bf16, as mixed precision is trained.
        model = model.float()
    else:
        linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        model = get_peft_model(model, LoraConfig(r=a.rank, lora_alpha=2 * a.rank, target_modules=linear))
        model.save_pretrained(f"{a.out}/first")
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=a.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    tokens = torch.from_numpy(numpy.fromfile(a.tokens, dtype=numpy.int32).astype(numpy.int64))
    losses, times = [], []
    for step in range(a.steps):
        begin = time.perf_counter()
        starts = [(step * a.batch + row) * a.seq for row in range(a.batch)]
        rows = torch.stack([tokens[start:start + a.seq + 1] for start in starts])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids=rows[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        times.append(time.perf_counter() - begin)
    if not a.full:
        model.save_pretrained(f"{a.out}/last")
    print(json.dumps({"losses": [round(loss, 4) for loss in losses], "step_s": round(statistics.median(times), 3),
                      "trained": sum(p.numel() for p in trained), "peak_rss_bytes": peak_rss_bytes()}))


if __name__ == "__main__":
    main()
