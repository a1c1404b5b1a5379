//! The ranks of two hosts as a mesh, and the groups in which they work together.

use trainyard_plan::canvas::Canvas;
use trainyard_program::{Axis, Mesh};

pub fn picture() -> String {
    let mesh = Mesh::data(2, 4);
    let mut canvas =
        Canvas::new(760.0, 250.0, "Eight ranks on two hosts: data_parallel_replicate_degree = 2, shard_degree = 4");
    let colours = ["parameters", "gather", "gradients", "pipeline"];
    for rank in 0..mesh.ranks() {
        let place = mesh.coordinates(rank);
        let (x, y) = (120.0 + 150.0 * f64::from(place.dp_shard), 60.0 + 90.0 * f64::from(place.dp_replicate));
        if place.dp_shard == 0 {
            canvas.rect((100.0, y - 12.0), (620.0, 64.0), "frame");
            canvas.text(10.0, y + 18.0, "", &format!("host {}", place.dp_replicate));
            canvas.text(10.0, y + 34.0, "small faded", &members(&mesh.group(rank, Axis::Shard).ranks));
        }
        canvas.rect((x, y), (110.0, 40.0), colours[place.dp_shard as usize]);
        canvas.centred(x + 55.0, y + 18.0, "on", &format!("rank {rank}"));
        canvas.centred(x + 55.0, y + 33.0, "small on", &format!("holds quarter {}", place.dp_shard + 1));
        if place.dp_replicate == 0 {
            let words = members(&mesh.group(rank, Axis::Replicate).ranks);
            canvas.centred(x + 55.0, 216.0, "small faded", &words);
        }
    }
    canvas.text(
        10.0,
        240.0,
        "small",
        "Inside a host: gather parameters, reduce-scatter gradients. Between hosts (one colour): all-reduce the own quarter.",
    );
    canvas.finish()
}

fn members(ranks: &[u32]) -> String {
    let ranks: Vec<String> = ranks.iter().map(u32::to_string).collect();
    format!("group {}", ranks.join(", "))
}
