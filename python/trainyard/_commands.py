"""The program's commands as functions."""

from ._program import TrainyardError, options, run, run_json
from ._run import Run

DOCTOR_CODES = (0, 3, 4)
"""Exit codes of `trainyard doctor` by the severity of what it found."""


def plan(config=None, *, settings=None, **named):
    """The best plans for a model on a cluster: a dictionary with `plans` (the best first), the
    `reasons`, and the `basis` of the prediction.

    `config` is a configuration file; without one, name `model`, `global_batch` and
    `sequence_length`. Other arguments are the options of `trainyard plan`, such as
    `cluster="64x8xH100"`, `stack="torchtitan"`, `top=3`.
    """
    return run_json("plan", *([config] if config is not None else []), *options(settings, **named))


def advise(config, *, settings=None, **named):
    """What every lever would bring to the training of `config`, as `trainyard advise` prints it."""
    return run_json("advise", config, *options(settings, **named))


def doctor(*paths):
    """The diagnosis of a run's folder, of what changed between two of them, or of traces of
    PyTorch's profiler, one file per rank. A dictionary with the verdicts and their evidence."""
    if not paths:
        raise TypeError("doctor() needs the folder of a run, or trace files")
    return run_json("doctor", *paths, good=DOCTOR_CODES)


def runs(folder="runs", **named):
    """The runs in `folder` with their results, settings and metrics: a list of dictionaries.
    Options: `sort`, `reverse`, `where`."""
    return run_json("runs", folder, *options(None, **named))


def train(config=None, *, settings=None, quiet=False, **named):
    """Trains by a configuration file, with its output on the screen unless `quiet`, and returns the
    `Run`. Other arguments are the options of `trainyard train`."""
    arguments = ["train", *([config] if config is not None else []), *options(settings, **named)]
    output = run(*arguments, echo=not quiet)
    for line in output.splitlines():
        if line.startswith("run folder"):
            return Run(line.removeprefix("run folder").rsplit(" (", 1)[0].strip())
    raise TrainyardError("the run ended without naming its folder", 0)


def frame(records):
    """A list of dictionaries as a data frame of pandas, nested keys joined by dots."""
    import pandas

    return pandas.json_normalize(records)
