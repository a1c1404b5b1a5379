#!/usr/bin/env python3
"""PyTorch baseline of T5 small: transformers' model on random tokens.

    torch_t5.py [--rows 4] [--steps 12] [--compile] [--dtype bf16|f32] [--threads 2]

A step is one batch of ROWS pairs of 512 tokens of the encoder and 114 of the decoder: forward, backward, clipping at 1
and AdamW (fused), no dropout. Prints one JSON line: the median time of a step after the first three, and the tokens of
both sides per second.
"""

import argparse
import json
import statistics
import time

import torch
import transformers


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--dtype", choices=["bf16", "f32"], default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    config = transformers.T5Config(dropout_rate=0.0, decoder_start_token_id=0)
    model = transformers.T5ForConditionalGeneration._from_config(config, attn_implementation="sdpa")
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    call = torch.compile(model) if args.compile else model
    times = []
    for step in range(args.steps):
        read = torch.randint(0, 32_000, (args.rows, 512))
        said = torch.randint(0, 32_000, (args.rows, 114))
        began = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bf16"):
            loss = call(input_ids=read, labels=said, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
    step_s = statistics.median(times[3:])
    print(json.dumps({
        "torch": torch.__version__, "transformers": transformers.__version__, "compiled": args.compile,
        "attention": model.config._attn_implementation, "dtype": args.dtype, "loss": loss.item(), "step_s": step_s,
        "tokens_per_s": args.rows * 626 / step_s,
    }))


if __name__ == "__main__":
    main()
