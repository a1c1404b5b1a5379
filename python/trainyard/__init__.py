"""Trainyard from Python: plans, diagnoses, runs and token files.

The program ``trainyard`` does the work; the wheel installs it beside this module. Functions start
it and return the JSON that it prints, as dictionaries and lists. ``frame`` makes data frames of
them.

    >>> import trainyard
    >>> answer = trainyard.plan(
    ...     model="llama-8b", cluster="1x8xH100", global_batch=64, sequence_length=8192
    ... )
    >>> answer["plans"][0]["layout"]

Keyword arguments are the options of the command of the same name, with underscores:
``global_batch=64`` is ``--global-batch 64``, ``models=True`` is ``--models``, and a list repeats
the option. ``settings`` is a dictionary of keys of the configuration: each is a ``--set``.
"""

from ._program import TrainyardError, executable
from ._commands import advise, doctor, frame, plan, runs, train
from ._run import Run
from ._tokens import TokenDataset, TokenFile

__all__ = [
    "Run",
    "TokenDataset",
    "TokenFile",
    "TrainyardError",
    "advise",
    "doctor",
    "executable",
    "frame",
    "plan",
    "runs",
    "train",
]
