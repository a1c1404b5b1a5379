"""Writes small traces in the format of PyTorch's profiler, and the figures that the package
HolisticTraceAnalysis gives of them.

    pip install HolisticTraceAnalysis==0.5.0
    python scripts/golden/make_traces.py crates/observe/tests/golden

The traces are made up: a seeded simulation of a host thread that launches kernels on streams. The
figures in `expected.json` are the package's, in microseconds, with its rounding of nanoseconds off.
"""

import json
import os
import random
import subprocess
import sys

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../peers/hta_figures.py")


class Trace:
    def __init__(self, seed, rocm=False, old=False, digits=0):
        self.random = random.Random(seed)
        self.events, self.correlation, self.rocm, self.old, self.digits = [], 100, rocm, old, digits
        self.host, self.streams = 1000.0, {}

    def number(self, value):
        return round(value, self.digits) if self.digits else round(value)

    def event(self, category, name, start, length, tid, args):
        start, end = self.number(start), self.number(start + length)
        length = self.number(end - start) if self.digits else end - start
        pid = 0 if "stream" in args else 77
        self.events.append({"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": start, "dur": length, "args": args})

    def host_event(self, name, start, length, annotation):
        category = "Operator" if self.old else ("user_annotation" if annotation else "cpu_op")
        self.event(category, name, start, length, "77" if self.old else 77, {"External id": len(self.events)})

    def launch(self, name, length, stream=7, after=None, copy=False):
        """Launches a kernel; `after` is a stream whose work it waits for."""
        self.correlation += 1
        call = ("hipLaunchKernel" if self.rocm else "cudaLaunchKernel") if not copy else ("hipMemcpyWithStream" if self.rocm else "cudaMemcpyAsync")
        cost = self.random.uniform(4, 9)
        self.event("Runtime" if self.old else "cuda_runtime", call, self.host, cost, "77" if self.old else 77, {"correlation": self.correlation})
        ready = max(self.host + self.random.uniform(5, 8), self.streams.get(stream, 0) + 1.5)
        if after is not None:
            ready = max(ready, self.streams.get(after, 0) + 2)
        category = ("Memcpy" if self.old else "gpu_memcpy") if copy else ("Kernel" if self.old else "kernel")
        args = {"device": 0, "stream": stream, "correlation": self.correlation}
        self.event(category, name, ready, length, f"stream {stream}" if self.old else stream, args)
        self.streams[stream] = ready + length
        if "Pageable" in name:
            # Such a copy returns when it is done.
            call_end = ready + length + 2
            self.events[-2]["dur"] = self.number(call_end) - self.events[-2]["ts"]
            self.host = call_end + 2
        else:
            self.host += cost + self.random.uniform(1, 6)

    def write(self, path, **more):
        document = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "Made up"}], **more}
        document["traceEvents"] = self.events
        lines = json.dumps(document, separators=(",", ":")).replace("},{\"ph\"", "},\n{\"ph\"")
        with open(path, "w") as file:
            file.write(lines + "\n")


def step(trace, number, body):
    begin = trace.host
    trace.host += 20
    body(trace)
    trace.host_event(f"ProfilerStep#{number}", begin, trace.host - begin, True)
    trace.host += 3


def loader(wait):
    """A step that waits for its batch, and then computes."""

    def body(trace):
        begin = trace.host
        trace.host += trace.random.uniform(0.9, 1.1) * wait
        trace.host_event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", begin, trace.host - begin, True)
        trace.launch("Memcpy HtoD (Pageable -> Device)", 40, copy=True)
        for index in range(24):
            trace.launch(f"void gemm_{index % 3}<float>(float*)", 20 + 30 * (index % 3))

    return body


def data_parallel(trace):
    for index in range(20):
        trace.launch(f"void forward_{index % 4}(float*)", trace.random.uniform(15, 60))
    for index in range(20):
        trace.launch(f"void backward_{index % 4}(float*)", trace.random.uniform(30, 90))
        if index % 5 == 4:
            trace.launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", trace.random.uniform(150, 400), stream=20, after=7)
    trace.launch("void adamw(float*)", 50, after=20)


def host_bound(trace):
    for index in range(30):
        trace.host += trace.random.uniform(10, 40)
        trace.launch(f"Cijk_Ailk_Bljk_SB_MT{index % 3}", trace.random.uniform(2, 9))


def main():
    folder = sys.argv[1]
    os.makedirs(folder, exist_ok=True)
    made = {
        "loader_bound": (Trace(1), loader(2500), {}),
        "loader_cured": (Trace(1), loader(10), {}),
        "loader_bound_2021": (Trace(2, old=True), loader(2500), {}),
        "data_parallel": (Trace(3, digits=3), data_parallel, {"distributedInfo": {"backend": "nccl", "rank": 1, "world_size": 2}}),
        "host_bound_rocm": (Trace(4, rocm=True, digits=3), host_bound, {}),
    }
    expected = {}
    for name, (trace, body, more) in made.items():
        for number in range(3, 8):
            step(trace, number, body)
        path = os.path.join(folder, f"{name}.json")
        trace.write(path, **more)
        answer = subprocess.run([sys.executable, SCRIPT, path], check=True, capture_output=True, text=True)
        expected[name] = json.loads(answer.stdout.splitlines()[-1])
        expected[name].pop("seconds")
    with open(os.path.join(folder, "expected.json"), "w") as file:
        json.dump(expected, file, indent=1)
        file.write("\n")


main()
