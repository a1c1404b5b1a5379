"""Runs a command without its output, and prints its wall time and peak memory as a line of JSON.

    python usage.py COMMAND ARGUMENT...
"""

import json
import os
import sys
import time

begin = time.perf_counter()
child = os.posix_spawn(
    sys.argv[1],
    sys.argv[1:],
    os.environ,
    file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0), (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)],
)
_, status, usage = os.wait4(child, 0)
seconds = time.perf_counter() - begin
print(json.dumps({"seconds": seconds, "bytes": usage.ru_maxrss * 1024, "code": os.waitstatus_to_exitcode(status)}))
