"""Starts the program and reads what it prints."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path


class TrainyardError(Exception):
    """The program refused its input or failed. The message is the program's own."""

    def __init__(self, message, code):
        super().__init__(message)
        self.code = code
        """The exit code."""


def executable():
    """The path of the program: that in the variable ``TRAINYARD``, else the program that was
    installed beside this Python, else the first on the path."""
    named = os.environ.get("TRAINYARD")
    if named:
        return named
    of_python = [sysconfig.get_path("scripts"), sysconfig.get_path("scripts", f"{os.name}_user")]
    folders = [*of_python, Path(sys.executable).parent]
    found = shutil.which("trainyard", path=os.pathsep.join(map(str, folders))) or shutil.which("trainyard")
    if found is None:
        raise FileNotFoundError(
            "the program `trainyard` is neither beside this Python nor on the path: install the wheel, "
            "or name the program in the environment variable TRAINYARD"
        )
    return found


def options(settings=None, **named):
    """The arguments for ``named`` options and for ``settings`` of the configuration."""
    arguments = []
    for name, value in named.items():
        option = "--" + name.replace("_", "-")
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if one is True:
                arguments.append(option)
            elif one is not None and one is not False:
                arguments += [option, str(one)]
    for key, value in (settings or {}).items():
        arguments += ["--set", f"{key}={toml(value)}"]
    return arguments


def toml(value):
    """``value`` as ``--set`` reads it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(json.dumps(one) if isinstance(one, str) else toml(one) for one in value) + "]"
    return str(value)


def run(*arguments, good=(0,), echo=False):
    """Runs the program and returns its standard output. With ``echo``, the output also
    appears as it is written. Exit codes other than ``good`` raise ``TrainyardError``."""
    command = [executable(), *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=None if echo else subprocess.PIPE, text=True) as child:
        if echo:
            lines = []
            for line in child.stdout:
                print(line, end="", flush=True)
                lines.append(line)
            output, said = "".join(lines), ""
            child.wait()
        else:
            output, said = child.communicate()
    if child.returncode not in good:
        ended = f"`{' '.join(command)}` ended with exit code {child.returncode}"
        raise TrainyardError(said.strip().removeprefix("error: ") or ended, child.returncode)
    return output


def run_json(*arguments, good=(0,)):
    """Runs the program with ``--json`` and returns the parsed output."""
    return json.loads(run(*arguments, "--json", good=good))
