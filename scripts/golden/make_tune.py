#!/usr/bin/env python3
"""Writes crates/tune/tests/golden/tune.json: Sobol points of PyTorch, and what Optuna's samplers reach on three objectives.

    .venv-peers/bin/pip install optuna scipy                         (with PyTorch, set up as make_goldens.py says)
    .venv-peers/bin/python scripts/golden/make_tune.py               # about a quarter of an hour of one core

The objectives are in crates/tune/tests/searches.rs too. For each sampler, the numbers are the least loss after 25 and
after 50 trials, for each seed: forty of TPE, ten of the Gaussian process, which takes longer. Optuna's `tpe` considers
all keys together, `tpe_independent` each by itself.
"""

import json
import math
import sys
from pathlib import Path

import optuna
import torch

GOLDEN = Path(__file__).resolve().parents[2] / "crates/tune/tests/golden/tune.json"
TRIALS = 50

HARTMANN_A = [[10, 3, 17, 3.5, 1.7, 8], [0.05, 10, 17, 0.1, 8, 14], [3, 3.5, 1.7, 10, 17, 8], [17, 8, 0.05, 10, 0.1, 14]]
HARTMANN_P = [[1312, 1696, 5569, 124, 8283, 5886], [2329, 4135, 8307, 3736, 1004, 9991],
              [2348, 1451, 3522, 2883, 3047, 6650], [4047, 8828, 8732, 5743, 1091, 381]]


def branin(trial):
    x, y = trial.suggest_float("x", -5, 10), trial.suggest_float("y", 0, 15)
    b, c = 5.1 / (4 * math.pi ** 2), 5 / math.pi
    return (y - b * x * x + c * x - 6) ** 2 + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x) + 10


def hartmann(trial):
    x = [trial.suggest_float(f"x{i}", 0, 1) for i in range(6)]
    weights = [1, 1.2, 3, 3.2]
    inner = [sum(a * (v - 1e-4 * p) ** 2 for a, p, v in zip(row, ps, x)) for row, ps in zip(HARTMANN_A, HARTMANN_P)]
    return -sum(w * math.exp(-s) for w, s in zip(weights, inner))


def recipe(trial):
    """Shaped like a training's loss: a valley in the learning rate that depends on the batch, a cliff above it."""
    rate = math.log10(trial.suggest_float("rate", 1e-5, 1, log=True))
    decay = math.log10(trial.suggest_float("decay", 1e-4, 1, log=True))
    batch = trial.suggest_int("batch", 8, 128, log=True)
    kind = trial.suggest_categorical("kind", ["cosine", "linear", "wsd"])
    best = -3 + 0.25 * math.log2(batch / 32) + {"cosine": 0, "linear": 0.3, "wsd": -0.3}[kind]
    loss = 1.9 + 0.25 * (rate - best) ** 2 + 0.02 * math.log2(batch / 32) ** 2 + 0.02 * (decay + 1.5) ** 2
    return loss + {"cosine": 0, "linear": 0.03, "wsd": 0.06}[kind] + 5 * max(0, rate - best - 1)


# Number of seeds, and the sampler of a seed.
SAMPLERS = {
    "tpe": (40, lambda seed: optuna.samplers.TPESampler(seed=seed)),
    "tpe_independent": (40, lambda seed: optuna.samplers.TPESampler(seed=seed, multivariate=False)),
    "gp": (10, lambda seed: optuna.samplers.GPSampler(seed=seed, deterministic_objective=True)),
}


def main():
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    torch.set_num_threads(1)
    golden = {"optuna": optuna.__version__, "torch": torch.__version__}
    golden["sobol"] = torch.quasirandom.SobolEngine(21).draw(64, dtype=torch.float64).tolist()
    for objective in (branin, hartmann, recipe):
        golden[objective.__name__] = {}
        for name, (seeds, make) in SAMPLERS.items():
            after = {"25": [], "50": []}
            for seed in range(seeds):
                study = optuna.create_study(sampler=make(seed))
                study.optimize(objective, n_trials=TRIALS)
                values = [trial.value for trial in study.trials]
                after["25"].append(min(values[:25]))
                after["50"].append(min(values))
            golden[objective.__name__][name] = after
            print(objective.__name__, name, {n: sum(v) / len(v) for n, v in after.items()}, file=sys.stderr, flush=True)
    GOLDEN.write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
