//! Reasons in words: the bottleneck of the best plan, the loss of the next best, and the effect of
//! small changes to the best.

use crate::{Memory, Objective, Plan, TimeCategory};
use trainyard_base::format_bytes;

/// A change of one choice of the best plan, simulated.
#[derive(Clone, PartialEq, Debug)]
pub struct Neighbour {
    /// Words for the change, e.g. `without checkpointing`.
    pub words: String,
    /// Cost relative to the best; 1.02 is 2 % worse.
    pub relative: f64,
    /// Peak bytes of the fullest device.
    pub bytes: u64,
}

/// Sentences about `plans`, which are sorted by `objective`, best first. A device may use
/// `bytes_max` bytes.
pub fn reasons(plans: &[Plan], neighbours: &[Neighbour], bytes_max: u64, objective: Objective) -> Vec<String> {
    let Some(best) = plans.first() else { return Vec::new() };
    let mut reasons = vec![bound(best), memory(&best.memory, bytes_max)];
    reasons.extend(too_large(neighbours, bytes_max, objective));
    reasons.extend(slower(neighbours, bytes_max));
    if let Some(next) = plans.get(1) {
        reasons.push(loses(best, next, objective));
    }
    reasons
}

fn percent(part: f64, whole: f64) -> String {
    let percent = 100.0 * part / whole;
    if percent < 9.95 { format!("{percent:.1} %") } else { format!("{percent:.0} %") }
}

/// `1.2 s`, `35 ms`, `12 us`
pub fn duration(seconds: f64) -> String {
    match seconds {
        s if s >= 99.95 => format!("{s:.0} s"),
        s if s >= 0.9995 => format!("{s:.2} s"),
        s if s >= 0.000_999_5 => format!("{:.1} ms", 1e3 * s),
        s => format!("{:.0} us", 1e6 * s),
    }
}

/// The bottleneck of a plan: compute, or the category that it waits for longest.
fn bound(best: &Plan) -> String {
    let total = best.breakdown.total();
    let mut waits: Vec<_> = best.breakdown.0.iter().filter(|(part, _)| !part.is_work()).copied().collect();
    waits.sort_by(|a, b| b.1.total_cmp(&a.1));
    let work = best.breakdown.work();
    let named: Vec<String> = waits
        .iter()
        .filter(|(_, seconds)| *seconds > 0.002 * total)
        .take(3)
        .map(|(part, seconds)| format!("{} {}", percent(*seconds, total), part.words()))
        .collect();
    let rest = match named.as_slice() {
        [] => "nothing else takes time".to_owned(),
        named => format!("then {}", named.join(", ")),
    };
    match waits.first() {
        Some((part, seconds)) if *seconds > 0.3 * total => format!(
            "It is bound by {}: {} of the step go into {}, while the device computes for {}.",
            match part {
                TimeCategory::Pipeline => "its pipeline",
                TimeCategory::Data => "its data",
                TimeCategory::Host => "the link to host memory",
                TimeCategory::Beside => "what happens between steps",
                _ => "communication",
            },
            percent(*seconds, total),
            part.words(),
            percent(work, total)
        ),
        _ => format!("It is bound by compute: the device computes for {} of the step; {rest}.", percent(work, total)),
    }
}

fn memory(memory: &Memory, bytes_max: u64) -> String {
    let mut kinds = memory.by_kind.clone();
    kinds.sort_by_key(|kind| std::cmp::Reverse(kind.1));
    let kinds: Vec<String> =
        kinds.iter().take(3).map(|(kind, bytes)| format!("{} {}", kind.name(), format_bytes(*bytes))).collect();
    format!(
        "The fullest device (rank {}) holds {} of {} at {}: {}.",
        memory.rank,
        format_bytes(memory.total),
        format_bytes(bytes_max),
        memory.at,
        kinds.join(", ")
    )
}

fn too_large(neighbours: &[Neighbour], bytes_max: u64, objective: Objective) -> Option<String> {
    // Only a change that would be better is mentioned.
    let large = neighbours.iter().filter(|n| n.bytes > bytes_max && n.relative < 1.0);
    let said: Vec<String> = large.map(|n| format!("{} needs {}", n.words, format_bytes(n.bytes))).collect();
    let better = if objective == Objective::Cost { "Cheaper" } else { "Faster" };
    (!said.is_empty()).then(|| format!("{better}, but too large: {}.", said.join("; ")))
}

fn slower(neighbours: &[Neighbour], bytes_max: u64) -> Option<String> {
    let mut fitting: Vec<&Neighbour> =
        neighbours.iter().filter(|n| n.bytes <= bytes_max && n.relative >= 1.0).collect();
    fitting.sort_by(|a, b| b.relative.total_cmp(&a.relative));
    let said: Vec<String> = fitting
        .iter()
        .take(5)
        .map(|n| match 100.0 * (n.relative - 1.0) {
            worse if worse < 0.05 => format!("{} changes nothing", n.words),
            worse => format!("{} costs {worse:.1} %", n.words),
        })
        .collect();
    (!said.is_empty()).then(|| format!("Of its choices, {}.", said.join("; ")))
}

/// The loss of the next best plan, by the categories that grew most: in seconds of a step, or, if
/// cost is minimised, in seconds of all devices together.
fn loses(best: &Plan, next: &Plan, objective: Objective) -> String {
    // All plans train on the same number of tokens per step.
    let devices = |plan: &Plan| match objective {
        Objective::Speed => 1.0,
        Objective::Cost => f64::from(plan.candidate.mesh.ranks()),
    };
    let price = |plan: &Plan| devices(plan) * plan.step_s;
    let spent = |plan: &Plan, part: TimeCategory| devices(plan) * plan.breakdown.seconds(part);
    let mut parts: Vec<(TimeCategory, f64)> = TimeCategory::ALL
        .into_iter()
        .map(|part| (part, spent(next, part) - spent(best, part)))
        .filter(|(_, seconds)| seconds.abs() > 0.002 * price(best))
        .collect();
    parts.sort_by(|a, b| b.1.abs().total_cmp(&a.1.abs()));
    let words: Vec<String> = parts
        .iter()
        .take(3)
        .map(|(part, seconds)| {
            let more = if *seconds > 0.0 { "more" } else { "less" };
            format!("{} {more} {}", duration(seconds.abs()), part.words())
        })
        .collect();
    let worse = 100.0 * (price(next) / price(best) - 1.0);
    let verdict = match (objective, worse) {
        (Objective::Speed, worse) if worse < 0.05 => "takes as long".to_owned(),
        (Objective::Speed, worse) => format!("takes {worse:.1} % longer"),
        (Objective::Cost, worse) if worse < 0.05 => "costs as much a token".to_owned(),
        (Objective::Cost, worse) => format!("costs {worse:.1} % more a token"),
    };
    let of = if objective == Objective::Cost { "in device time " } else { "" };
    let why = if words.is_empty() { String::new() } else { format!(": {of}{}", words.join(", ")) };
    format!("The next best layout ({}) {verdict}{why}.", next.layout)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Breakdown, Candidate};
    use trainyard_program::{MemoryKind, Mesh};
    use trainyard_sim::{Format, Interval};

    fn plan(layout: &str, parts: &[(TimeCategory, f64)]) -> Plan {
        let breakdown = Breakdown(parts.to_vec());
        Plan {
            candidate: Candidate::plain(Mesh::default(), 1, 1, Format::Bf16),
            cuts: Vec::new(),
            layout: layout.into(),
            step_s: breakdown.total(),
            tokens_per_s: 1.0,
            model_flops_per_s: 1.0,
            mfu: 0.5,
            memory: Memory {
                total: 70 << 30,
                by_kind: vec![(MemoryKind::Data, 1), (MemoryKind::Activations, 60 << 30)],
                other: 0,
                rank: 3,
                at: "backward block.4".into(),
            },
            usd_per_million_tokens: None,
            step_interval: Interval::exact(1.0),
            memory_interval: Interval::exact(1.0),
            not_fitting: 0.0,
            breakdown,
        }
    }

    #[test]
    fn reasons_name_what_bounds_and_what_the_next_loses() {
        let best =
            plan("tp 8", &[(TimeCategory::Forward, 3.0), (TimeCategory::Backward, 6.0), (TimeCategory::Pipeline, 1.0)]);
        let next =
            plan("tp 4", &[(TimeCategory::Forward, 3.0), (TimeCategory::Backward, 6.0), (TimeCategory::Gather, 2.0)]);
        let neighbours = [
            Neighbour { words: "no checkpointing".into(), relative: 0.9, bytes: 100 << 30 },
            Neighbour { words: "micro-batch 2".into(), relative: 1.021, bytes: 72 << 30 },
        ];
        let said = reasons(&[best.clone(), next], &neighbours, 79 << 30, Objective::Speed);
        assert_eq!(
            said,
            [
                "It is bound by compute: the device computes for 90 % of the step; then 10 % waiting for other pipeline stages.",
                "The fullest device (rank 3) holds 70.0 GiB of 79.0 GiB at backward block.4: activations 60.0 GiB, data 1 B.",
                "Faster, but too large: no checkpointing needs 100.0 GiB.",
                "Of its choices, micro-batch 2 costs 2.1 %.",
                "The next best layout (tp 4) takes 10.0 % longer: 2.00 s more waiting for parameters to be gathered, \
                 1.00 s less waiting for other pipeline stages.",
            ]
        );
        let slow = plan("dp", &[(TimeCategory::Forward, 1.0), (TimeCategory::Reduce, 3.0)]);
        assert!(
            reasons(&[slow], &[], 1 << 30, Objective::Speed)[0]
                .starts_with("It is bound by communication: 75 % of the step go into waiting for grad")
        );
        assert!(reasons(&[], &[], 0, Objective::Speed).is_empty());
    }

    /// Regression: a next best plan that took half the time on twice the devices was said to take
    /// as long.
    #[test]
    fn the_next_best_of_the_cheapest_loses_money_not_time() {
        let best =
            plan("dp 1", &[(TimeCategory::Forward, 3.0), (TimeCategory::Backward, 6.0), (TimeCategory::Beside, 1.0)]);
        let mut next = plan(
            "shard 2",
            &[(TimeCategory::Forward, 1.5), (TimeCategory::Backward, 3.0), (TimeCategory::Beside, 1.0)],
        );
        next.candidate.mesh = Mesh::data(1, 2);
        let neighbours = [Neighbour { words: "no offload".into(), relative: 0.9, bytes: 100 << 30 }];
        let said = reasons(&[best, next], &neighbours, 79 << 30, Objective::Cost);
        assert_eq!(said[2], "Cheaper, but too large: no offload needs 100.0 GiB.");
        assert_eq!(
            said[3],
            "The next best layout (shard 2) costs 10.0 % more a token: in device time 1.00 s more fixed costs of a step, and its slowest node."
        );
    }

    #[test]
    fn durations_have_readable_units() {
        assert_eq!([123.4, 1.234, 0.01234, 5e-5].map(duration), ["123 s", "1.23 s", "12.3 ms", "50 us"]);
    }
}
