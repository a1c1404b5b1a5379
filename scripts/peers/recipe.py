"""Training a small model on a text by a recipe: what the baselines of a loss have in common."""

import argparse
import math
import os
import statistics
import time
from dataclasses import dataclass

import torch


@dataclass
class Recipe:
    """Sequences of `context` tokens, `batch` of them a step; the rate rises to `rate` and falls as a cosine to a tenth."""

    context: int
    batch: int
    warmup: int
    rate: float = 1e-3

    def learning_rate(self, step, steps):
        if step < self.warmup:
            return self.rate * (step + 1) / (self.warmup + 1)
        progress = (step - self.warmup) / (steps - self.warmup)
        least = self.rate / 10
        return least + 0.5 * (1 + math.cos(math.pi * progress)) * (self.rate - least)

    def draw(self, ids, generator):
        starts = torch.randint(len(ids) - self.context, (self.batch, 1), generator=generator)
        window = ids[starts + torch.arange(self.context + 1)]
        return window[:, :-1], window[:, 1:]

    @torch.no_grad()
    def whole_split_loss(self, model, ids, rows):
        """Nats per token over all of `ids`, in windows that do not overlap, `rows` of them at a time."""
        windows = (len(ids) - 1) // self.context
        inputs = ids[: windows * self.context].view(windows, self.context)
        targets = ids[1 : windows * self.context + 1].view(windows, self.context)
        total = sum(model(x, y).item() * x.numel() for x, y in zip(inputs.split(rows), targets.split(rows)))
        return total / (windows * self.context)

    def train(self, run, optimizer, ids, a):
        """Trains `run`, which gives the loss of inputs and targets. Returns what a report has of it."""
        generator = torch.Generator().manual_seed(a.seed)
        times = []
        stepping = time.perf_counter()
        for step in range(a.steps):
            start = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate(step, a.steps)
            inputs, targets = self.draw(ids, generator)
            with half(a):
                loss = run(inputs, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss.item()
            times.append(time.perf_counter() - start)
        stepping_s = time.perf_counter() - stepping
        return dict(
            steps=a.steps, dtype=a.dtype, mode=a.mode, threads=a.threads,
            step_s=statistics.median(times[len(times) // 10 :]), stepping_s=stepping_s, train_loss=loss.item(),
            tcmalloc="tcmalloc" in os.environ.get("LD_PRELOAD", ""))


def half(a):
    """Products in bf16, if that is asked for."""
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=a.dtype == "bf16")


def arguments(description, steps):
    """The command line, with threads and seed set."""
    cli = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("text")
    cli.add_argument("--steps", type=int, default=steps)
    cli.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    cli.add_argument("--mode", choices=["eager", "compile", "max-autotune"], default="eager")
    cli.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    cli.add_argument("--seed", type=int, default=1337)
    a = cli.parse_args()
    torch.set_num_threads(a.threads)
    torch.manual_seed(a.seed)
    return a
