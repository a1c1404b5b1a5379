"""The start of the PyTorch baselines that run on several ranks."""

import subprocess
import sys


def arguments_of_rank(cli):
    """The arguments of `cli`, and --threads. With --ranks this program runs again, once a rank."""
    cli.add_argument("--threads", type=int, default=1, help="of each rank")
    cli.add_argument("--ranks", type=int, default=0, help="start so many under torchrun")
    arguments = cli.parse_args()
    if not arguments.ranks:
        return arguments
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.ranks}", sys.argv[0]]
    sys.exit(subprocess.call(command + [f"--{key}={value}" for key, value in vars(arguments).items() if key != "ranks"]))
