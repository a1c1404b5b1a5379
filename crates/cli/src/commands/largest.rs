//! `trainyard bench largest`: finds the largest model that this machine can train, and trains it.

use super::bench::{TrainArgs, configuration, show};
use crate::output::{count, print};
use anyhow::{Result, bail};
use serde_json::json;
use std::time::Instant;
use trainyard_base::format_bytes;
use trainyard_engine::bench::steps_on;
use trainyard_engine::largest::{Largest, Room, largest};

/// The most layers of a model that fit here, trained for a few steps on random tokens.
///
/// The memory of a step is predicted to the byte for each number of layers, so only the largest
/// model is created. Settings count as in a run: with --set memory.offload.optimizer=disk and
/// --checkpointing full more layers fit.
#[derive(clap::Args)]
pub struct LargestArgs {
    #[command(flatten)]
    train: TrainArgs,
    /// Print the largest model that would fit, and train nothing.
    #[arg(long)]
    predict: bool,
}

/// Runs the command.
pub fn run(args: &LargestArgs, process_start: Instant) -> Result<()> {
    let configure = |layers: usize| configuration(&args.train, &[format!("model.layers={layers}")]);
    let first = configure(1)?;
    if configure(2)?.model == first.model {
        bail!("the number of layers is what is looked for: leave model.layers out of --set");
    }
    if first.parallel.ranks > 1 {
        bail!("one rank is measured here: leave [parallel] out");
    }
    let device = trainyard_engine::device::open(&first, None, None)?;
    let room = Room::of(&first, &device)?;
    let Some(Largest { layers, parameters, resolved, prediction }) = largest(&room, configure)? else {
        bail!(
            "not even one layer fits in {}: --checkpointing full, fewer --rows, a smaller --vocab-size or memory.offload make it smaller",
            format_bytes(room.device as u64)
        );
    };
    let needs = json!({
        "layers": layers,
        "parameters": parameters,
        "room": {"device_bytes": room.device, "host_bytes": room.host, "disk_bytes": room.disk},
        "mem_predicted_bytes": prediction.memory.peak_total(),
        "host_predicted_bytes": prediction.host_memory.peak_total(),
        "disk_bytes": prediction.disk,
    });
    if args.predict && args.train.json {
        return print(format_args!("{needs}\n"));
    }
    if !args.train.json {
        print(format_args!(
            "{layers} layers, {} parameters: a step needs {} of {}{}{}\n",
            count(parameters),
            format_bytes(prediction.memory.peak_total() as u64),
            format_bytes(room.device as u64),
            beside(prediction.host_memory.peak_total() as u64, room.host as u64, "the host"),
            beside(prediction.disk, room.disk, "disk"),
        ))?;
    }
    if args.predict {
        return Ok(());
    }
    let report = steps_on(&device, &resolved, args.train.steps, process_start)?;
    if !args.train.json {
        return show(&args.train, &report);
    }
    let mut line = serde_json::to_value(&report)?;
    line["layers"] = layers.into();
    line["room"] = needs["room"].clone();
    print(format_args!("{line}\n"))
}

/// `, 1.5 GiB of 12.0 GiB on disk`; empty if nothing is there.
fn beside(bytes: u64, room: u64, place: &str) -> String {
    if bytes > 0 { format!(", {} of {} on {place}", format_bytes(bytes), format_bytes(room)) } else { String::new() }
}
