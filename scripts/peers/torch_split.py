#!/usr/bin/env python3
"""PyTorch baseline of split models: GPT-2 124M on random tokens over gloo, one process a rank.

    torchrun --nproc-per-node 2 torch_split.py --strategy tp --threads 1
    torch_split.py --ranks 2 --strategy pp --schedule 1f1b --threads 1      # starts torchrun itself

Tensor parallelism is `parallelize_module` with DTensor: columns of qkv and of the first
feed-forward product, rows of the second products, rows of the tied embedding, and a loss over the
split vocabulary. The whole batch goes at once. A pipeline is `torch.distributed.pipelining` with
one micro-batch per sequence; stages have equally many blocks, and the head has a matrix of its own.
Rank 0 prints one JSON line: tokens_per_s and step_s (median) of the batch.
"""

import argparse
import os
import statistics
import time

from torchrun import arguments_of_rank


def main():
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--strategy", choices=["tp", "pp"], required=True)
    cli.add_argument("--schedule", choices=["1f1b", "zbv"], default="1f1b", help="of a pipeline")
    cli.add_argument("--dtype", choices=["f32", "bf16"], default="bf16")
    cli.add_argument("--batch", type=int, default=8, help="sequences of a step")
    cli.add_argument("--seq", type=int, default=256)
    cli.add_argument("--layers", type=int, default=12)
    cli.add_argument("--steps", type=int, default=3, help="timed steps")
    cli.add_argument("--warmup", type=int, default=1, help="steps before them")
    a = arguments_of_rank(cli)

    import dataclasses

    import torch
    import torch.distributed as dist
    from gpt import SHAPES, report

    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    shape = dataclasses.replace(SHAPES["gpt2-124m"], layers=a.layers)
    parameters, step = (tensor_parallel if a.strategy == "tp" else pipeline)(a, shape, rank, world)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=a.strategy == "pp")

    times = []
    for _ in range(a.warmup + a.steps):
        ids, targets = torch.randint(0, shape.vocab, (2, a.batch, a.seq)).unbind(0)
        dist.barrier()
        start = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=a.dtype == "bf16"):
            step(ids, targets)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.barrier()
        times.append(time.perf_counter() - start)

    if rank == 0:
        step_s = statistics.median(times[a.warmup:])
        tokens = a.batch * a.seq
        report(
            strategy=a.strategy, schedule=a.schedule if a.strategy == "pp" else None, dtype=a.dtype, ranks=world, threads=a.threads,
            layers=a.layers, tokens_per_step=tokens, tcmalloc="tcmalloc" in os.environ.get("LD_PRELOAD", ""), step_s=step_s,
            step_s_all=times, tokens_per_s=tokens / step_s)
    dist.destroy_process_group()


def tensor_parallel(a, shape, rank, world):
    """The parameters of this rank, and a function that runs forward and backward of a batch."""
    import torch.nn.functional as F
    from gpt import GPT
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

    mesh = init_device_mesh("cpu", (world,))
    model = GPT(shape)
    plan = {"wte": RowwiseParallel(input_layouts=Replicate())}
    for layer, block in enumerate(model.blocks):
        for name in ["attn", "fc"]:
            plan[f"blocks.{layer}.{name}"] = ColwiseParallel()
        for name in ["attn_proj", "fc_proj"]:
            plan[f"blocks.{layer}.{name}"] = RowwiseParallel()
        # Rows of qkv are cut as they lie, so each rank has whole heads of which it makes its
        # queries, keys and values.
        block.heads //= world
        block.forward = block_forward.__get__(block)
    parallelize_module(model, mesh, plan)

    def step(ids, targets):
        x = model.wte(ids) + model.wpe.weight[: ids.shape[1]]
        for block in model.blocks:
            x = block(x)
        x = DTensor.from_local(model.ln_f(x), mesh, [Replicate()], run_check=False)
        logits = F.linear(x.flatten(0, 1), model.wte.weight)
        with loss_parallel():
            loss = F.cross_entropy(logits.float(), targets.flatten())
            loss.backward()

    return list(model.parameters()), step


def block_forward(self, x_btd):
    """A block whose width inside attention is that of this rank's heads."""
    import torch.nn.functional as F

    b, t, _ = x_btd.shape
    qkv = self.attn(self.ln_1(x_btd)).unflatten(2, (3, self.heads, -1))
    q_bhtk, k_bhtk, v_bhtk = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    mixed = F.scaled_dot_product_attention(q_bhtk, k_bhtk, v_bhtk, is_causal=True)
    x_btd = x_btd + self.attn_proj(mixed.transpose(1, 2).reshape(b, t, -1))
    return x_btd + self.fc_proj(F.gelu(self.fc(self.ln_2(x_btd)), approximate=self.gelu))


def pipeline(a, shape, rank, world):
    """As `tensor_parallel`, for the stages of this rank."""
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
    from gpt import Block
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleZBVZeroBubble

    chunks = 2 if a.schedule == "zbv" else 1
    count = chunks * world

    class Stretch(nn.Module):
        def __init__(self, number):
            super().__init__()
            blocks = range(number * shape.layers // count, (number + 1) * shape.layers // count)
            self.blocks = nn.ModuleList(Block(shape) for _ in blocks)
            self.wte = self.wpe = self.head = self.ln_f = None
            if number == 0:
                self.wte, self.wpe = nn.Embedding(shape.vocab, shape.dim), nn.Embedding(shape.context, shape.dim)
            if number == count - 1:
                self.ln_f, self.head = nn.LayerNorm(shape.dim), nn.Linear(shape.dim, shape.vocab, bias=False)

        def forward(self, x):
            if self.wte is not None:
                x = self.wte(x) + self.wpe.weight[: x.shape[1]]
            for block in self.blocks:
                x = block(x)
            return x if self.head is None else self.head(self.ln_f(x))

    # A V: the last stretch lies on the first rank.
    numbers = [rank, count - 1 - rank] if chunks == 2 else [rank]
    modules = [Stretch(number) for number in numbers]
    stages = [PipelineStage(module, number, count, torch.device("cpu")) for module, number in zip(modules, numbers)]
    loss_of = lambda logits, targets: F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    if chunks == 2:
        schedule = ScheduleZBVZeroBubble(stages, n_microbatches=a.batch, loss_fn=loss_of)
    else:
        schedule = Schedule1F1B(stages[0], n_microbatches=a.batch, loss_fn=loss_of)
    first, last = 0 in numbers, count - 1 in numbers

    def step(ids, targets):
        schedule.step(*([ids] if first else []), **({"target": targets} if last else {}))

    return [p for module in modules for p in module.parameters()], step


if __name__ == "__main__":
    main()
