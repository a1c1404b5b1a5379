//! Programs as text.

use crate::{
    Action, Axis, BackwardPart, Effect, Encoding, Fragment, Instruction, Keep, Layout, Memory, Phase, Program, State,
};
use std::fmt;

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = Memory::of(self);
        let mesh = &self.mesh;
        let degrees = [
            ("pp", mesh.pp),
            ("dp_replicate", mesh.dp_replicate),
            ("dp_shard", mesh.dp_shard),
            ("cp", mesh.cp),
            ("tp", mesh.tp),
            ("ep", mesh.ep),
        ];
        let degrees =
            degrees.iter().filter(|(_, degree)| *degree > 1).map(|(name, degree)| format!(", {name} {degree}"));
        let (counts, degrees) = (self.instructions.len(), degrees.collect::<String>());
        let server = self.server.map_or_else(String::new, |server| {
            let index = self.rank;
            let hosts = if index < server.servers { format!(" and server {index}") } else { String::new() };
            let backups = match server.backups {
                0 => String::new(),
                1 => ", 1 back-up worker".to_owned(),
                count => format!(", {count} back-up workers"),
            };
            format!(", worker{hosts} of {} servers, staleness {}{backups}", server.servers, server.staleness)
        });
        let fragment = self.fragment.map_or_else(String::new, |Fragment { index, count, overlaps }| {
            let beside = if overlaps { ", beside the step" } else { "" };
            format!(", fragment {index} of {count}{beside}")
        });
        let of = format!("rank {} of {}{degrees}{server}{fragment}", self.rank, mesh.ranks());
        let batches = if self.micro_batches == 1 { "micro-batch" } else { "micro-batches" };
        writeln!(f, "{of}: {counts} instructions, {} units, {} {batches}", self.units.len(), self.micro_batches)?;
        writeln!(
            f,
            "   no  lane     what                                   memory  after; moves; takes and gives back"
        )?;
        for (number, instruction) in self.instructions.iter().enumerate() {
            let (lane, what) = (instruction.action.lane().name(), describe(self, instruction.action));
            let (held, peak) =
                (size(memory.running_bytes[number]), if number == memory.peak_at { "  <- peak" } else { "" });
            let line = format!("{number:>5}  {lane:<8} {what:<34} {held:>10}  {}{peak}", details(instruction));
            writeln!(f, "{}", line.trim_end())?;
        }
        self.write_summary(&memory, f)
    }
}

impl Program {
    fn write_summary(&self, memory: &Memory, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\nlane      instructions       moves")?;
        for lane in self.summary() {
            let moves = if lane.bytes == 0 { "-".to_owned() } else { size(lane.bytes) };
            writeln!(f, "{:<9} {:>12} {moves:>11}", lane.lane.name(), lane.instructions)?;
        }
        let list = |effects: &[Effect]| {
            let of = effects.iter().map(|effect| format!("{} {}", effect.kind.name(), size(effect.bytes as u64)));
            of.collect::<Vec<_>>().join(", ")
        };
        writeln!(f, "\nresident  {}: {}", size(memory.resident_bytes), list(&self.resident))?;
        let peak = format!("{} at {} ({})", size(memory.peak_bytes), memory.peak_at, self.describe(memory.peak_at));
        writeln!(f, "peak      {peak}: {}", list(&memory.at_peak))
    }

    /// Describes instruction `number` in words, without lane and dependencies.
    ///
    /// # Panics
    ///
    /// If there is no such instruction.
    pub fn describe(&self, number: usize) -> String {
        describe(self, self.instructions[number].action)
    }
}

/// Bytes with a unit. Values below ten get two decimals: listings of small programs are read
/// closely.
fn size(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB"];
    let (mut value, mut unit) = (bytes as f64, "B");
    for next in units {
        if value < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, next);
    }
    match unit {
        "B" => format!("{bytes} B"),
        _ if value < 10.0 => format!("{value:.2} {unit}"),
        _ => format!("{value:.1} {unit}"),
    }
}

fn details(instruction: &Instruction) -> String {
    let mut details = Vec::new();
    if !instruction.after.is_empty() {
        let after: Vec<String> = instruction.after.iter().map(u32::to_string).collect();
        details.push(format!("after {}", after.join(", ")));
    }
    if instruction.bytes > 0 {
        details.push(format!("moves {}", size(instruction.bytes)));
    }
    if let Some(encoding) = &instruction.encoding {
        let Encoding { codec, over, feedback, momentum } = encoding;
        let axis = if *over == Axis::Data { Axis::Shard } else { *over };
        let sent = size(instruction.sent_bytes(axis, instruction.bytes));
        let alone = matches!(over, Axis::Shard | Axis::Pipeline);
        let over = if alone { String::new() } else { unless(*over, Axis::Data) };
        let with = match (feedback, momentum) {
            (_, true) => ", with feedback and momentum",
            (true, false) => ", with feedback",
            (false, false) => "",
        };
        details.push(format!("as {codec}{over} {sent}{with}"));
    }
    for effect in &instruction.effects {
        let sign = if effect.bytes < 0 { '-' } else { '+' };
        details.push(format!("{} {sign}{}", effect.kind.name(), size(effect.bytes.unsigned_abs())));
    }
    if instruction.working_bytes > 0 {
        details.push(format!("works in {}", size(instruction.working_bytes)));
    }
    details.join("; ")
}

fn describe(program: &Program, action: Action) -> String {
    let name = action.name();
    let unit_name = |unit: u32| program.units.get(unit as usize).map_or("?", String::as_str);
    match action {
        Action::Forward { unit, segment, micro_batch, keep } => {
            let keep = match keep {
                Keep::Everything => "",
                Keep::Selective => ", keep selective",
                Keep::InputOnly => ", keep input",
            };
            format!("{name} {}{} {micro_batch}{keep}", segment_name(program, unit, segment), unit_name(unit))
        }
        Action::Backward { unit, segment, micro_batch, part } => {
            let part = match part {
                BackwardPart::Whole => "",
                BackwardPart::Input => ", of the input",
                BackwardPart::Weights => ", of the weights",
            };
            format!("{name} {}{} {micro_batch}{part}", segment_name(program, unit, segment), unit_name(unit))
        }
        Action::Load { micro_batch } => format!("{name} micro-batch {micro_batch}"),
        Action::Fold { unit, micro_batch } => format!("{name} {} {micro_batch}", unit_name(unit)),
        Action::Gather { unit, over } => format!("{name} {} from {over}", unit_name(unit)),
        Action::Release { unit, keep } if keep == program.mesh.shard_degree() => format!("{name} {}", unit_name(unit)),
        Action::Release { unit, keep } => format!("{name} {} to 1/{keep}", unit_name(unit)),
        Action::Reduce { unit, accumulate, axis } => {
            let add = if accumulate { ", add" } else { "" };
            format!("{name} {}{}{add}", unit_name(unit), unless(axis, Axis::Data))
        }
        Action::Tie { unit, axis } => format!("{name} {}{}", unit_name(unit), unless(axis, Axis::Pipeline)),
        Action::Update { unit, chunk } => {
            let rounds = program.rounding_bits_of(unit).map_or(String::new(), |bits| format!(", to {bits} bits"));
            let pruned = if program.is_pruned(unit) { ", pruned" } else { "" };
            format!("{name} {}{}{rounds}{pruned}", unit_name(unit), part(program, unit, chunk))
        }
        Action::Outer { unit, axis } => format!("{name} {}{}", unit_name(unit), unless(axis, Axis::Replicate)),
        Action::Merge { unit } => format!("{name} {}", unit_name(unit)),
        Action::Push { unit } => format!("{name} {} to {}", unit_name(unit), servers(program)),
        Action::Commit => format!("{name} the step to {}", servers(program)),
        Action::Pull { unit, staleness: 0 } => format!("{name} {} from {}", unit_name(unit), servers(program)),
        Action::Pull { unit, staleness } => {
            format!("{name} {} from {}, {staleness} stale", unit_name(unit), servers(program))
        }
        Action::Fetch { unit, state } => format!("{name} {}", state_name(program, unit, state)),
        Action::Evict { unit, state, write } => {
            format!("{} {}", if write { name } else { "drop" }, state_name(program, unit, state))
        }
        Action::Send { to, unit, micro_batch, phase } => {
            format!("{name} {} {micro_batch} to {to}", flow(unit_name(unit), phase))
        }
        Action::Recv { from, unit, micro_batch, phase } => {
            format!("{name} {} {micro_batch} from {from}", flow(unit_name(unit), phase))
        }
        Action::Exchange { collective, axis, unit, micro_batch, phase, border, times } => {
            match exchanged(program, unit, phase, border).filter(|_| axis != Axis::Expert) {
                Some((value, [from, to])) => {
                    let (name, of) = (collective.name(), flow(value, phase));
                    let layouts = format!("{} -> {} over {}", from.name(), to.name(), axis.name());
                    format!("{name} {of} of {} {micro_batch}: {layouts}", unit_name(unit))
                }
                None => {
                    let what = format!("{collective:?} x {times} over {axis:?}").to_lowercase();
                    format!("{what}, {} {micro_batch}", flow(unit_name(unit), phase))
                }
            }
        }
        Action::Count { axis } => format!("{name}{}", unless(axis, Axis::Data)),
        Action::Clip { .. } | Action::Snapshot => name.to_owned(),
    }
}

/// The number of servers in words.
fn servers(program: &Program) -> String {
    match program.server.map_or(0, |server| server.servers) {
        1 => "1 server".to_owned(),
        servers => format!("{servers} servers"),
    }
}

/// The axis in words, unless it is the usual one.
fn unless(axis: Axis, usual: Axis) -> String {
    if axis == usual { String::new() } else { format!(" over {}", axis.name()) }
}

/// The segment of a split unit in words; nothing for a unit that runs as a whole.
fn segment_name(program: &Program, unit: u32, segment: u32) -> String {
    let split = program.split_of(unit).and_then(|split| split.segments.get(segment as usize));
    split.map_or_else(String::new, |segment| format!("{} of ", segment.name))
}

/// The name of the value that changes its layout at a border of a split unit, and the layouts of
/// the value, or of its gradient, before and after.
fn exchanged(program: &Program, unit: u32, phase: Phase, border: u32) -> Option<(&str, [Layout; 2])> {
    let split = program.split_of(unit)?;
    let border = split.borders.get(border as usize)?;
    let [from, to] = [border.from, border.to].map(|value| &split.values[value as usize]);
    let layouts = match phase {
        Phase::Forward => [from.layout, to.layout],
        Phase::Backward => [to.layout.of_gradient(), from.layout.of_gradient()],
    };
    Some((&from.name, layouts))
}

fn state_name(program: &Program, unit: u32, state: State) -> String {
    let name = &program.units[unit as usize];
    match state {
        State::Parameters => format!("parameters of {name}"),
        State::Optimizer { chunk } => format!("optimizer of {name}{}", part(program, unit, chunk)),
        State::Activations { micro_batch } => format!("activations {micro_batch} of {name}"),
        State::Gradients => format!("gradients of {name}"),
    }
}

/// The chunk in words, if the unit has several.
fn part(program: &Program, unit: u32, chunk: u32) -> String {
    match program.chunks_of(unit) {
        1 => String::new(),
        chunks => format!(", {} of {chunks}", chunk + 1),
    }
}

fn flow(unit: &str, phase: Phase) -> String {
    match phase {
        Phase::Forward => unit.to_owned(),
        Phase::Backward => format!("gradient of {unit}"),
    }
}
