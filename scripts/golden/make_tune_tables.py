#!/usr/bin/env python3
"""Writes crates/tune/tests/golden/tables.json: three trainings as tables, and Optuna's searches on them.

    cargo build && .venv-peers/bin/pip install optuna scipy
    .venv-peers/bin/python scripts/golden/make_tune_tables.py target/debug/trainyard     # a quarter of an hour
    .venv-peers/bin/python scripts/golden/make_tune_tables.py                            # the searches alone: minutes

Each objective is a small training on this repository's documentation. Every combination of its settings is trained, and
its validation loss kept after 1/9, 1/3 and all of its steps; diverged trainings are null. A search on a table then costs
nothing, so that many seeds can be compared. Trials of all searches have the same settings to choose from: numbers in
ascending order, by their place. For each sampler of Optuna there is the least loss after 24 and after 48 trials, for
each seed. Without a program the tables stay as they are.
"""

import itertools
import json
import math
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import optuna

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "crates/tune/tests/golden/tables.json"
AFTER, STEPS = (24, 48), 54
RATES = ["2e-4", "4e-4", "8e-4", "1.6e-3", "3.2e-3", "6.4e-3", "1.28e-2", "2.56e-2", "5.12e-2", "0.1024"]

BASE = """
[model]
dim = 48
layers = 2
heads = 2
[tokenizer]
kind = "bytes"
[data]
train = ["text.txt"]
validation_fraction = 0.1
[training]
micro_batch_size = 4
sequence_length = 64
[precision]
compute = "f32"
[compute]
threads = 1
[checkpoint]
keep_last = 1
[metrics]
record = false
[evaluation]
tokens_max = 4096
"""

# Tokens are the same for all trials of an objective, so that a larger batch has fewer steps.
OBJECTIVES = {
    "llama_adamw": (["model.family=llama"], {
        "optimizer.learning_rate": RATES,
        "optimizer.weight_decay": ["0.0", "0.1", "0.3"],
        "optimizer.beta2": ["0.9", "0.95", "0.99", "0.999"],
    }),
    "gpt2_batch": (["model.family=gpt2"], {
        "optimizer.learning_rate": RATES,
        "training.micro_batch_size": ["2", "4", "8", "16"],
        "schedule.min_ratio": ["0.01", "0.1", "1.0"],
    }),
    "llama_muon": (["model.family=llama", "optimizer.name=muon"], {
        "optimizer.learning_rate": RATES,
        "optimizer.matrix_learning_rate": ["0.005", "0.01", "0.02", "0.05"],
        "optimizer.momentum": ["0.8", "0.9", "0.95"],
    }),
}


def losses(program, folder, number, sets):
    """The validation losses of one training at the three shares; None if it diverged."""
    rows = next((int(s.split("=")[1]) for s in sets if s.startswith("training.micro_batch_size")), 4)
    steps = STEPS * 4 // rows
    run = f"run-{number}"
    command = [program, "train", "base.toml", "--quiet", "--set", f"run.name={run}", "--set", f"training.steps={steps}",
               "--set", f"evaluation.interval_steps={steps // 9}"]
    done = subprocess.run(command + [word for s in sets for word in ("--set", s)], cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        print(f"{sets}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    found = {}
    for line in (folder / "runs" / run / "evaluations.jsonl").read_text().splitlines():
        record = json.loads(line)
        found[record["step"]] = record["loss"]
    subprocess.run(["rm", "-r", str(folder / "runs" / run)], check=True)
    shares = [found.get(steps // 9), found.get(steps // 3), found.get(steps)]
    return None if any(loss is None for loss in shares) else [round(loss, 5) for loss in shares]


def table(program, folder, name):
    fixed, keys = OBJECTIVES[name]
    points = list(itertools.product(*keys.values()))
    sets = [fixed + [f"{key}={value}" for key, value in zip(keys, point)] for point in points]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda pair: losses(program, folder, f"{name}-{pair[0]}", pair[1]), enumerate(sets)))
    return {"keys": list(keys), "values": list(keys.values()), "losses": found}


def searched(table):
    """The least losses that Optuna's samplers reach, by sampler, number of trials and seed."""
    # Number of seeds, and the sampler of a seed.
    samplers = {
        "tpe": (40, lambda seed: optuna.samplers.TPESampler(seed=seed)),
        "tpe_independent": (40, lambda seed: optuna.samplers.TPESampler(seed=seed, multivariate=False)),
        "gp": (10, lambda seed: optuna.samplers.GPSampler(seed=seed)),
    }

    def objective(trial):
        place = 0
        for key, values in zip(table["keys"], table["values"]):
            place = place * len(values) + trial.suggest_int(key, 0, len(values) - 1)
        loss = table["losses"][place]
        return float("nan") if loss is None else loss[-1]

    found = {}
    for name, (seeds, make) in samplers.items():
        found[name] = {str(n): [] for n in AFTER}
        for seed in range(seeds):
            study = optuna.create_study(sampler=make(seed))
            study.optimize(objective, n_trials=AFTER[-1])
            values = [math.inf if trial.value is None else trial.value for trial in study.trials]
            for n in AFTER:
                found[name][str(n)].append(min(values[:n]))
    return found


def train_tables(program):
    tables = {}
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "base.toml").write_text(BASE)
        pages = sorted((ROOT / "docs").glob("*.md"))
        (folder / "text.txt").write_text("\n\n".join(page.read_text() for page in pages))
        # The first run makes the token files that all others share.
        losses(program, folder, "first", OBJECTIVES["llama_adamw"][0])
        for name in OBJECTIVES:
            tables[name] = table(program, folder, name)
            print(name, min(loss[-1] for loss in tables[name]["losses"] if loss), file=sys.stderr, flush=True)
    return tables


def main():
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if len(sys.argv) > 1:
        tables = train_tables(str(Path(sys.argv[1]).resolve()))
    else:
        known = json.loads(GOLDEN.read_text())
        tables = {name: known[name] for name in OBJECTIVES}
    for name in OBJECTIVES:
        tables[name]["optuna"] = searched(tables[name])
    GOLDEN.write_text(json.dumps({"optuna": optuna.__version__} | tables) + "\n")


if __name__ == "__main__":
    main()
