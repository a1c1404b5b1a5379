//! Options of torchrun's and deepspeed's launchers that do not exist here. Each is refused with a
//! message that names the equivalent.

use std::num::ParseIntError;
use std::ops::RangeInclusive;
use std::str::FromStr;

const RANKS_HERE: RangeInclusive<u32> = 1..=4096;
const HOSTS: RangeInclusive<u32> = 1..=65_536;

const ENDPOINT: &str = "ranks meet at host 0: on one host leave it out; on several say --master-addr HOST --master-port PORT, and on each host --node-rank R";
const RUN: &str = "runs are told apart by their port: leave it out, and give runs that share host 0 different values of --master-port";
const HOSTFILE: &str = "launch reaches no other host: start it once on each, with --nnodes N --node-rank R --master-addr HOST, or by srun; a build with MPI takes \
                        `mpirun --hostfile FILE trainyard train ...`";
const CHOICE: &str = "start launch on the hosts that are to take part, and choose their GPUs by CUDA_VISIBLE_DEVICES";

/// The refused options: none of them parses.
#[derive(clap::Args, Debug)]
#[group(skip)]
pub struct Args {
    #[arg(long, alias = "rdzv_endpoint", hide = true, value_name = "HOST:PORT", value_parser = refused(ENDPOINT))]
    rdzv_endpoint: Option<String>,
    #[arg(long, alias = "rdzv_backend", hide = true, value_name = "NAME", value_parser = refused(ENDPOINT))]
    rdzv_backend: Option<String>,
    #[arg(long, alias = "rdzv_id", hide = true, value_name = "ID", value_parser = refused(RUN))]
    rdzv_id: Option<String>,
    #[arg(long, hide = true, value_name = "FILE", value_parser = refused(HOSTFILE))]
    hostfile: Option<String>,
    #[arg(long, hide = true, value_name = "HOSTS", value_parser = refused(CHOICE))]
    include: Option<String>,
    #[arg(long, hide = true, value_name = "HOSTS", value_parser = refused(CHOICE))]
    exclude: Option<String>,
    #[arg(long, alias = "num_gpus", hide = true, value_name = "N", value_parser = refused("it is called --nproc-per-node here"))]
    num_gpus: Option<String>,
    #[arg(long, alias = "num_nodes", hide = true, value_name = "N", value_parser = refused("it is called --nnodes here"))]
    num_nodes: Option<String>,
}

fn refused(why: &'static str) -> impl Fn(&str) -> Result<String, &'static str> + Clone + Send + Sync + 'static {
    move |_| Err(why)
}

/// `--nproc-per-node`, of which torchrun also takes `auto`, `gpu` and `cpu`.
pub fn ranks_here(text: &str) -> Result<u32, String> {
    number(text, RANKS_HERE, "how many ranks, such as one for each GPU: nothing is counted here")
}

/// The number of a run's hosts: `--nnodes N`, or `MIN:MAX` for hosts that come and go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hosts {
    /// As many from the beginning to the end.
    Fixed(u32),
    /// At least and at most so many.
    Between(u32, u32),
}

impl FromStr for Hosts {
    type Err = String;

    fn from_str(text: &str) -> Result<Hosts, String> {
        let Some((min, max)) = text.split_once(':') else {
            return Ok(Hosts::Fixed(number(text, HOSTS, "how many hosts, or MIN:MAX for hosts that come and go")?));
        };
        let (min, max) = (number(min, HOSTS, "the fewest hosts")?, number(max, HOSTS, "the most hosts")?);
        if min > max {
            return Err(format!(
                "at least {min} and at most {max} hosts: no number is both; write the smaller one first"
            ));
        }
        Ok(Hosts::Between(min, max))
    }
}

fn number(text: &str, range: RangeInclusive<u32>, what: &str) -> Result<u32, String> {
    let wanted = format!("a number from {} to {} is wanted, {what}", range.start(), range.end());
    let number: u32 = text.parse().map_err(|_: ParseIntError| wanted.clone())?;
    if range.contains(&number) { Ok(number) } else { Err(wanted) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_ranks_and_hosts_are_whole_and_in_range() {
        assert_eq!((ranks_here("8"), "65536".parse()), (Ok(8), Ok(Hosts::Fixed(65_536))));
        assert_eq!("2:6".parse(), Ok(Hosts::Between(2, 6)));
        for text in ["auto", "gpu", "0", "4097", "-1", ""] {
            assert!(ranks_here(text).is_err_and(|why| why.contains("from 1 to 4096")), "{text}");
        }
        for (text, why) in [("3:2", "the smaller one first"), ("0:2", "the fewest hosts"), ("1:", "the most hosts")] {
            let error = text.parse::<Hosts>().unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
