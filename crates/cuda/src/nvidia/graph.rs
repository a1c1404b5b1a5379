//! Captures streams into graphs. All calls are made in the context of this thread.

use super::{called, event_of, stream_of};
use crate::driver::{Event, Graph, Stream};
use crate::error::Result;
use cudarc::driver::sys;

fn exec_of(graph: Graph) -> sys::CUgraphExec {
    graph.0 as sys::CUgraphExec
}

pub fn begin(stream: Stream) -> Result<()> {
    // What other threads do with the device meanwhile is no part of it and harms it only where it
    // waits for the whole device.
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    // SAFETY: streams live as long as the device.
    called("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(stream_of(stream), mode) }.result())
}

pub fn end(stream: Stream) -> Result<Graph> {
    let mut graph = std::ptr::null_mut();
    // SAFETY: as above; writes a handle.
    called("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(stream_of(stream), &mut graph) }.result())?;
    let mut exec = std::ptr::null_mut();
    // SAFETY: the graph was just made; it is a template, of which nothing is needed once it is
    // instantiated.
    let made = unsafe {
        let made = sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0).result();
        sys::cuGraphDestroy(graph).result().ok();
        made
    };
    called("cuGraphInstantiate", made)?;
    Ok(Graph(exec as usize))
}

pub fn launch(stream: Stream, graph: Graph) -> Result<()> {
    // SAFETY: both exist; that the memory of its work does too is the business of who captured it.
    called("cuGraphLaunch", unsafe { sys::cuGraphLaunch(exec_of(graph), stream_of(stream)) }.result())
}

pub fn destroy(graph: Graph) {
    // SAFETY: it was made by `end` and is given back once.
    unsafe { sys::cuGraphExecDestroy(exec_of(graph)) }.result().ok();
}

pub fn record(event: Event, stream: Stream) -> Result<()> {
    let external = sys::CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL as u32;
    // SAFETY: both exist.
    let recorded = unsafe { sys::cuEventRecordWithFlags(event_of(event), stream_of(stream), external) };
    called("cuEventRecordWithFlags", recorded.result())
}

/// True if the stream is in a capture.
pub fn is_capturing(stream: Stream) -> Result<bool> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the stream exists; writes a status.
    called("cuStreamIsCapturing", unsafe { sys::cuStreamIsCapturing(stream_of(stream), &mut status) }.result())?;
    Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}
