#!/usr/bin/env python3
"""Writes crates/engine/tests/golden/events.hex: event records as TensorBoard's own messages and writer make them.

    .venv-peers/bin/pip install tensorboard
    .venv-peers/bin/python scripts/golden/make_events.py             # writes the golden file
    .venv-peers/bin/python scripts/golden/make_events.py FOLDER      # prints the scalars that TensorBoard finds in FOLDER
"""

import io
import sys
from pathlib import Path

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

GOLDEN = Path(__file__).resolve().parents[2] / "crates/engine/tests/golden/events.hex"


def write():
    value = summary_pb2.Summary.Value
    events = [
        event_pb2.Event(wall_time=1.5e9, step=0, file_version="brain.Event:2"),
        event_pb2.Event(wall_time=1.5e9, step=301,
                        session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START)),
        event_pb2.Event(wall_time=1.5e9 + 0.25, step=301, summary=summary_pb2.Summary(value=[
            value(tag="loss_metrics/global_avg_loss", simple_value=2.5), value(tag="mfu(%)", simple_value=31.25)])),
    ]
    # Proto3 leaves out fields that are zero; ours are written, which readers take for the same.
    out = io.BytesIO()
    writer = RecordWriter(out)
    for event in events:
        data = event.SerializeToString()
        if event.step == 0:
            data = data[:9] + b"\x10\x00" + data[9:]
            assert event_pb2.Event.FromString(data) == event
        writer.write(data)
    GOLDEN.write_text(out.getvalue().hex() + "\n")


def read(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    accumulator = EventAccumulator(folder)
    accumulator.Reload()
    for tag in accumulator.Tags()["scalars"]:
        print(tag, [(e.step, round(e.value, 6)) for e in accumulator.Scalars(tag)])


if __name__ == "__main__":
    read(sys.argv[1]) if len(sys.argv) > 1 else write()
