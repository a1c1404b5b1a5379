#!/usr/bin/env python3
"""Gain of each key of `training.recipe = "fast"`, and of keys beside it: each is turned off alone.

    python scripts/recipe_keys.py CONFIG --set data.train=shakespeare.txt --loss 1.95

Every case trains CONFIG with the recipe once a seed, in turn, so that a machine that slows down slows all cases
down. A line per case: the final validation loss (median over the seeds), the first evaluated step at or below
--loss with its seconds of steps, and the median seconds of a step. "never" says that some seed has not come there.
Rates fall to zero at the last step, so steps to a loss compare cases of one number of steps only. Runs are kept in
--out; a run that is there is read and not trained again, so an interrupted measurement goes on.
"""

import argparse
import json
import pathlib
import re
import statistics
import subprocess

# Keys of the recipe with the value that turns each off, and keys of the model with the one that
# turns it on.
RECIPE = {
    "Muon": ["optimizer.name=adamw", "optimizer.learning_rate=3e-3"],
    "matrix rate": ["optimizer.matrix_learning_rate=0.02"],
    "rate": ["optimizer.learning_rate=3e-3"],
    "decay to zero": ["schedule.min_ratio=0.1"],
    "linear decay": ["schedule.kind=cosine"],
}
MODEL = {
    "value residuals": ["model.value_residual=true"],
    "squared ReLU": ["model.activation=relu_squared"],
    "query/key norms": ["model.qk_norm=true"],
}


def cases(beside):
    """Pairs of a name and settings beside the recipe: all, without each, none, each alone, and each of `beside`."""
    everything = [setting for settings in MODEL.values() for setting in settings]
    yield "all", everything
    for key, off in RECIPE.items():
        yield f"without {key}", everything + off
    for key, on in MODEL.items():
        yield f"without {key}", [setting for setting in everything if setting not in on]
    yield "the recipe", []
    for key, on in MODEL.items():
        yield f"the recipe with {key}", on
    for setting in beside:
        yield f"the recipe with {setting}", [setting]


def lines(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def run(a, name, settings, seed):
    """The evaluations and steps of a run."""
    folder = pathlib.Path(a.out) / f"{re.sub('[^a-zA-Z0-9]+', '-', name)}-{seed}"
    if not (folder / "finished").exists():
        sets = [
            "training.recipe=fast",
            f"training.steps={a.steps}",
            f"training.seed={seed}",
            f"evaluation.interval_steps={a.interval}",
            f"run.directory={json.dumps(a.out)}",
            f"run.name={json.dumps(folder.name)}",
            *a.set,
            *settings,
        ]
        if "optimizer.name=adamw" in settings:
            # AdamW refuses a rate of matrices, so the other keys of the recipe stand alone.
            sets.remove("training.recipe=fast")
            sets += ["schedule.kind=linear", "schedule.min_ratio=0"]
        command = [a.trainyard, "train", "--quiet", a.config]
        for setting in sets:
            command += ["--set", setting]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (folder / "finished").touch()
    return lines(folder / "evaluations.jsonl"), lines(folder / "metrics.jsonl")


def summary(runs, target):
    final, reached, step_s = [], [], []
    for evaluations, steps in runs:
        seconds = [step["step_s"] for step in steps]
        final.append(evaluations[-1]["loss"])
        step_s.append(statistics.median(seconds))
        first = next((e["step"] for e in evaluations if e["loss"] <= target), None)
        reached.append(first and (first, sum(seconds[:first])))
    medians = [statistics.median(column) for column in zip(*reached)] if all(reached) else None
    there = f"{medians[0]:.0f} steps, {medians[1]:.1f} s" if medians else "never"
    return f"{statistics.median(final):.4f} ({min(final):.4f} to {max(final):.4f}) | {there} | {statistics.median(step_s) * 1e3:.1f} ms"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--trainyard", default="trainyard", help="the program")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for every case")
    parser.add_argument("--beside", action="append", default=[], metavar="KEY=VALUE", help="a case of its own")
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--interval", type=int, default=25, help="steps between evaluations")
    parser.add_argument("--loss", type=float, default=1.95, help="the loss to come to")
    parser.add_argument("--seeds", default="1337,1338,1339")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--out", default="recipe-keys")
    a = parser.parse_args()
    a.set.append("metrics.tensorboard=false")
    chosen = [case for case in cases(a.beside) if a.only in case[0]]
    results = {name: [] for name, _ in chosen}
    for seed in a.seeds.split(","):
        for name, settings in chosen:
            results[name].append(run(a, name, settings, seed))
    print(f"| case | final loss (range) | to {a.loss} | a step |\n|---|---|---|---|")
    for name, runs in results.items():
        print(f"| {name} | {summary(runs, a.loss)} |")


main()
