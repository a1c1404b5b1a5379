#!/usr/bin/env python3
"""PyTorch baseline of slow links: a GPT of 25 M parameters on random bytes over gloo, two hosts of one rank.

    torch_slow_links.py --way ddp|power_sgd|diloco --rank 0|1 --master ADDRESS

`ddp` is DistributedDataParallel, `power_sgd` the same with PyTorch's PowerSGD hook (rank 4, from the second
step on), `diloco` a loop of AdamW steps with an outer Nesterov step on the mean change of the parameters every
100 steps. Rank 0 prints one JSON line: step_s (mean of the timed steps), steps (all), loss.
"""

import argparse
import os
import time


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--way", choices=["ddp", "power_sgd", "diloco"], required=True)
    cli.add_argument("--rank", type=int, required=True)
    cli.add_argument("--master", required=True)
    cli.add_argument("--steps", type=int, default=6, help="timed steps")
    cli.add_argument("--every", type=int, default=100, help="steps between outer steps of diloco")
    a = cli.parse_args()

    os.environ.update(MASTER_ADDR=a.master, MASTER_PORT="29500", RANK=str(a.rank), WORLD_SIZE="2")
    import torch
    import torch.distributed as dist
    from gpt import GPT, Shape, report
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = GPT(Shape(layers=8, heads=8, dim=512, vocab=256, context=64))
    wrapped = model
    warm = 4
    if a.way != "diloco":
        # The hook's exchanges of several buckets pass one another over gloo, which then fails: one bucket.
        buckets = {"bucket_cap_mb": 1000} if a.way == "power_sgd" else {}
        wrapped = DistributedDataParallel(model, **buckets)
    else:
        warm = a.every
        a.steps = max(a.steps, a.every)
    if a.way == "power_sgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    outer = [p.detach().clone() for p in model.parameters()]
    outer_rule = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)

    def meet():
        for kept, p in zip(outer, model.parameters()):
            kept.grad = kept - p.detach()
            dist.all_reduce(kept.grad)
            kept.grad /= 2
        outer_rule.step()
        for kept, p in zip(outer, model.parameters()):
            p.data.copy_(kept)

    torch.manual_seed(1 + a.rank)
    start = None
    for step in range(warm + a.steps):
        if step == warm:
            dist.barrier()
            start = time.perf_counter()
        ids = torch.randint(0, 256, (1, 65))
        loss = wrapped(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if a.way == "diloco" and (step + 1) % a.every == 0:
            meet()
    dist.barrier()
    step_s = (time.perf_counter() - start) / a.steps
    if a.rank == 0:
        report(way=a.way, step_s=step_s, steps=warm + a.steps, loss=float(loss))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
