#!/usr/bin/env python3
"""PyTorch baseline of data-parallel training: GPT-2 124M on random tokens, DDP or FSDP2 over gloo, one process a rank.

    torchrun --nproc-per-node 2 torch_parallel.py --strategy ddp --threads 1
    torch_parallel.py --ranks 2 --strategy fsdp --threads 1      # starts torchrun itself

PyTorch is faster here with tcmalloc; preload it (LD_PRELOAD) for a fair comparison. Rank 0 prints one JSON line: tokens_per_s and step_s (median)
of the global batch, peak_rss_bytes of one rank.
"""

import argparse
import os
import statistics
import time

from torchrun import arguments_of_rank


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--strategy", choices=["ddp", "fsdp"], required=True)
    cli.add_argument("--dtype", choices=["f32", "bf16"], default="bf16")
    cli.add_argument("--batch", type=int, default=4, help="sequences of a step, over all ranks")
    cli.add_argument("--seq", type=int, default=512)
    cli.add_argument("--steps", type=int, default=4, help="timed steps")
    cli.add_argument("--warmup", type=int, default=1, help="steps before them")
    a = arguments_of_rank(cli)

    import torch
    import torch.distributed as dist
    from gpt import GPT, SHAPES, peak_rss_bytes, report
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    shape = SHAPES["gpt2-124m"]
    model = GPT(shape)
    params = sum(p.numel() for p in model.parameters())
    bf16 = a.dtype == "bf16"
    if a.strategy == "fsdp":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        run, autocast = model, False
    else:
        run, autocast = torch.nn.parallel.DistributedDataParallel(model), bf16
    # Sharded parameters are distributed tensors, which the fused optimizer does not take everywhere.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=a.strategy == "ddp")

    times = []
    for _ in range(a.warmup + a.steps):
        start = time.perf_counter()
        ids, targets = torch.randint(0, shape.vocab, (2, a.batch // world, a.seq)).unbind(0)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = run(ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        times.append(time.perf_counter() - start)

    if rank == 0:
        step_s = statistics.median(times[a.warmup:])
        tokens = a.batch * a.seq
        report(
            strategy=a.strategy, dtype=a.dtype, ranks=world, threads=a.threads, params=params, tokens_per_step=tokens,
            tcmalloc="tcmalloc" in os.environ.get("LD_PRELOAD", ""), step_s=step_s, step_s_all=times,
            tokens_per_s=tokens / step_s, peak_rss_bytes=peak_rss_bytes())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
