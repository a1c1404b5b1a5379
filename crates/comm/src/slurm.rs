//! The host of a Slurm step's first task, and the port at which the step's ranks meet.

/// Ports given to steps: `PORT_FIRST + (job + STEP_STRIDE step) mod PORTS`, above those of services
/// and below those that systems give to connections.
const PORT_FIRST: u64 = 10_000;
const PORTS: u64 = 20_000;
/// Steps of one job may run side by side, and jobs have neighbouring numbers.
const STEP_STRIDE: u64 = 1_009;

/// The first host of a list in Slurm's form: `node[03-07,12],gpu1` begins with `node03`. None of
/// text that is no such list.
pub(crate) fn first_host(list: &str) -> Option<String> {
    let list = list.trim();
    let Some((prefix, rest)) = list.split_once('[').filter(|(prefix, _)| !prefix.contains(',')) else {
        return list.split(',').next().map(str::to_owned).filter(|host| !host.is_empty() && !host.contains(']'));
    };
    let (numbers, suffix) = rest.split_once(']')?;
    let first = numbers.split([',', '-']).next().filter(|number| !number.is_empty())?;
    // A name may have several brackets: `rack[1-2]node[1-4]`.
    let suffix = match suffix.split(',').next() {
        None | Some("") => String::new(),
        Some(_) => first_host(suffix)?,
    };
    Some(format!("{prefix}{first}{suffix}"))
}

/// The port at which the ranks of a step meet.
pub(crate) fn port(job: u64, step: u64) -> u16 {
    (PORT_FIRST + job.wrapping_add(STEP_STRIDE.wrapping_mul(step)) % PORTS) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_host_of_a_list() {
        for (list, first) in [
            ("node7", Some("node7")),
            ("node1,node2", Some("node1")),
            ("node[03-07,12],gpu1", Some("node03")),
            ("node[5,9]", Some("node5")),
            ("login,node[1-2]", Some("login")),
            ("rack[1-2]node[04-09].site", Some("rack1node04.site")),
            ("a[1-2]-ib,b3", Some("a1-ib")),
            ("", None),
            ("node[", None),
            ("node[]", None),
        ] {
            assert_eq!(first_host(list).as_deref(), first, "{list}");
        }
    }

    #[test]
    fn ports_are_those_of_nobody_else() {
        assert_eq!(port(0, 0), 10_000);
        assert!((0..100_000).step_by(997).all(|job| (10_000..30_000).contains(&port(job, job % 7))));
        assert_ne!(port(5, 0), port(5, 1));
        assert!(port(u64::MAX, u64::MAX) >= 10_000);
    }
}
