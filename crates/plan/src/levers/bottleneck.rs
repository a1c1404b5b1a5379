//! The bottleneck of a step, in a sentence that needs no other page.

use super::{Place, Price, Setup};
use crate::TimeCategory;
use crate::explain::duration;
use trainyard_base::format_bytes;

/// Share of the step from which something that compute waits for is called the bottleneck.
const BOUND: f64 = 0.3;

/// A category in words that need no explanation.
fn plainly(part: TimeCategory) -> &'static str {
    match part {
        TimeCategory::Beside => "what every step costs however small it is (launches, the slowest node)",
        part => part.words(),
    }
}

/// The bottleneck of the step of `setup`.
pub fn words(setup: &Setup, place: &Place, price: &Price) -> String {
    let total = price.breakdown.total().max(f64::MIN_POSITIVE);
    let mut waits: Vec<(TimeCategory, f64)> =
        price.breakdown.0.iter().filter(|(part, _)| !part.is_work()).copied().collect();
    waits.sort_by(|a, b| b.1.total_cmp(&a.1));
    let percent = |seconds: f64| format!("{:.0} %", 100.0 * seconds / total);
    let of = |part: TimeCategory| price.breakdown.seconds(part);
    let [forward, backward, update] = [TimeCategory::Forward, TimeCategory::Backward, TimeCategory::Update].map(of);
    let work =
        format!("{} forward and loss, {} backward, {} update", percent(forward), percent(backward), percent(update));
    let bound = match waits.first() {
        Some((part, seconds)) if *seconds > BOUND * total => {
            format!("waits: {} of it is {}. It computes for the rest: {work}.", percent(*seconds), plainly(*part))
        }
        Some((part, seconds)) if *seconds > 0.02 * total => {
            format!("computes most of the time: {work}. The longest wait is {}: {}.", percent(*seconds), plainly(*part))
        }
        _ => format!("computes all the time: {work}. Nothing waits for disk, loading or other ranks."),
    };
    let idle = place.devices / setup.candidate.mesh.ranks().max(1);
    let more =
        if place.all_devices && idle > 1 { format!(" It uses one of every {idle} devices.") } else { String::new() };
    let memory = match price.bytes_max {
        Some(most) if price.bytes > most => {
            format!(" It does not fit: {} of {}.", format_bytes(price.bytes), format_bytes(most))
        }
        Some(most) => format!(" Memory: {} of {}.", format_bytes(price.bytes), format_bytes(most)),
        None => format!(" Memory: {}.", format_bytes(price.bytes)),
    };
    format!("A step takes {} and {bound}{more}{memory}", duration(price.step_s))
}
