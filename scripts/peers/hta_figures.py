"""The figures of one trace by the package HolisticTraceAnalysis, as one line of JSON.

    python hta_figures.py TRACE

Times are microseconds. Figures that the package cannot compute are null. Rounding of nanoseconds to
microseconds is off: it shortens every kernel by up to two microseconds.
"""

import json
import logging
import math
import os
import sys
import time
import warnings

os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"
warnings.filterwarnings("ignore")

from hta.trace_analysis import TraceAnalysis  # noqa: E402

logging.disable(logging.CRITICAL)


def attempt(compute):
    try:
        return compute()
    except Exception:  # whatever the package stumbles over
        return None


def main():
    trace = os.path.abspath(sys.argv[1])
    begin = time.perf_counter()
    analysis = attempt(lambda: TraceAnalysis(trace_files={0: trace}, trace_dir="/"))
    breakdown = attempt(lambda: analysis.get_temporal_breakdown(visualize=False).iloc[0].to_dict())
    overlap = attempt(lambda: analysis.get_comm_comp_overlap(visualize=False).iloc[0].to_dict())
    idle = attempt(lambda: analysis.get_idle_time_breakdown(ranks=[0], visualize=False)[0])
    attempt(lambda: analysis.get_gpu_kernel_breakdown(visualize=False))
    seconds = time.perf_counter() - begin
    figures = {"seconds": seconds, "total": None, "compute": None, "non_compute": None, "idle": None}
    if breakdown is not None:
        figures["total"] = float(breakdown["kernel_time(us)"])
        figures["compute"] = float(breakdown["compute_time(us)"])
        figures["non_compute"] = float(breakdown["non_compute_time(us)"])
        figures["idle"] = float(breakdown["idle_time(us)"])
    share = None if overlap is None else float(overlap["comp_comm_overlap_pctg"]) / 100
    figures["overlap"] = None if share is None or math.isnan(share) else share
    figures["host_wait"] = None
    if idle is not None:
        figures["host_wait"] = float(idle[idle["idle_category"] == "host_wait"]["idle_time"].sum())
    print(json.dumps(figures))


main()
