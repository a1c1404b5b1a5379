"""The folder of a run."""

import json
from pathlib import Path

from ._program import options, run, run_json


class Run:
    """A run, finished or going on, by its folder. Everything is read when it is asked for."""

    def __init__(self, folder):
        self.folder = Path(folder)
        if not (self.folder / "config.toml").is_file():
            raise FileNotFoundError(f"{self.folder} is not the folder of a run: it has no config.toml")

    def __repr__(self):
        return f"Run({str(self.folder)!r})"

    @property
    def config(self):
        """The configuration, a dictionary of its sections."""
        import tomllib

        return tomllib.loads((self.folder / "config.toml").read_text())

    @property
    def model(self):
        """The model's shape, a dictionary."""
        return json.loads((self.folder / "model.json").read_text())

    @property
    def plan(self):
        """The step program's prediction, and at the end of the run its measurement."""
        return json.loads((self.folder / "plan.json").read_text())

    def metrics(self):
        """A dictionary a recorded step: `step`, `loss`, `lr`, `tps`, ... (docs/training.md)."""
        return self._lines("metrics.jsonl")

    def evaluations(self):
        """A dictionary an evaluation: `step`, `loss`, `perplexity`, ..."""
        return self._lines("evaluations.jsonl")

    def health(self):
        """A dictionary for each loss or norm that jumped."""
        return self._lines("health.jsonl")

    def resume(self, *, settings=None, quiet=False, **named):
        """Goes on from the newest checkpoint; options as those of `trainyard train --resume`."""
        run("train", "--resume", self.folder, *options(settings, **named), echo=not quiet)
        return self

    def evaluate(self, data, **named):
        """Loss, perplexity and bits per byte on a file or a list of files."""
        return run_json("eval", self.folder, *options(None, data=data, **named))

    def generate(self, prompt="", **named):
        """The continuation of `prompt`. Options: `tokens=100`, `temperature=0.8`, `seed=0`, ..."""
        return run("generate", self.folder, *options(None, prompt=prompt, **named))

    def export(self, out, **named):
        """Writes a Hugging Face folder to `out` and returns its path."""
        run("export", self.folder, *options(None, out=out, **named))
        return Path(out)

    def doctor(self):
        """The run's diagnosis: its verdicts with their evidence and what a cure would save."""
        from ._commands import doctor

        return doctor(self.folder)

    def _lines(self, name):
        path = self.folder / name
        if not path.exists():
            return []
        # The last line of a run that goes on may be half written.
        lines = path.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines if line]
