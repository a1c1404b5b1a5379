//! Resolves `update.rule = "server"`.

use super::resolve::Resolver;
use super::sections::*;
use super::sections_fine_tuning::AdapterMethod;
use super::sections_parallel::*;
use super::sections_precision::Fp8Recipe;
use super::{DeviceKind, Parallel};
use serde::Serialize;
use trainyard_program::ParameterServer;

/// The rule of workers with a parameter server.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct ServerRule {
    /// The servers and the bound of staleness.
    pub server: ParameterServer,
    /// The most steps from one step at which all workers have all updates to the next.
    pub every: u64,
}

/// The largest bound of staleness. A server holds the gradients of all workers for one step more.
const STALENESS_MAX: u64 = 1 << 10;

impl Resolver {
    /// Resolves the keys of a parameter server; None with another rule.
    pub(super) fn server(&mut self, parallel: &Parallel) -> Option<ServerRule> {
        let UpdateSection { rule, every, servers, staleness, backup_workers, .. } = self.config.update.clone();
        if rule != UpdateRule::Server {
            let because = format!("update.rule is \"{rule}\"");
            self.unused("update.servers", &servers, &because);
            self.unused("update.staleness", &staleness, &because);
            self.unused("update.backup_workers", &backup_workers, &because);
            return None;
        }
        self.refuse_with_server(parallel);
        let workers = parallel.data_degree();
        let servers = self.settle("update.servers", &servers, workers, "one on each rank");
        self.count("update.servers", Some(servers as u64), 1, workers as u64);
        let servers = servers.clamp(1, workers.max(1));
        if !workers.is_multiple_of(servers) {
            let message = format!(
                "update.servers = {servers} divide the parameters of {workers} workers among them: use a number that divides {workers}"
            );
            self.problem("update.servers", message);
        }
        let because = "the bits of synchronous steps";
        let staleness = self.settle("update.staleness", &staleness, 0, because);
        self.count("update.staleness", Some(staleness as u64), 0, STALENESS_MAX);
        self.count(
            "update.backup_workers",
            backup_workers.map(|count| count as u64),
            0,
            workers.saturating_sub(1) as u64,
        );
        let backups = backup_workers.unwrap_or(0).min(workers.saturating_sub(1));
        if backups > 0 && staleness > 0 {
            let message = format!(
                "update.backup_workers = {backups} makes each step's update without late workers, and update.staleness = {staleness} waits for \
                 them later: set one of them to 0"
            );
            self.problem("update.backup_workers", message);
        }
        let every = if staleness == 0 && backups == 0 {
            self.unused("update.every", &every, "update.staleness is 0, and workers have all updates after every step");
            1
        } else {
            let every = self.settle("update.every", &every, 50, "a wait for the slowest worker is rare");
            self.count("update.every", Some(every as u64), 1, super::resolve_update::EVERY_MAX);
            (every as u64).clamp(1, super::resolve_update::EVERY_MAX)
        };
        let server = ParameterServer { servers: servers as u32, staleness: staleness as u32, backups: backups as u32 };
        Some(ServerRule { server, every })
    }

    /// Refuses the settings that do not go with a parameter server.
    fn refuse_with_server(&mut self, parallel: &Parallel) {
        let Parallel { shard, context, tensor, pipeline, experts, elastic, .. } = *parallel;
        let config = &self.config;
        let offload = &config.offload;
        let offloads = [offload.optimizer, offload.parameters, offload.gradients];
        let whole_matrices = config.optimizer.name.looks_at_matrices();
        let CompressionSection { gradients, parameters, outer, .. } = config.compression;
        let codecs = [gradients, parameters, outer];
        let lacks = [
            (parallel.data_degree() == 1, "parallel.ranks = 2 or more, because each rank is a worker"),
            (shard > 1, "parallel.data_parallel_shard_degree = 1, because servers divide the state by themselves"),
            (context > 1, "parallel.context_parallel_degree = 1"),
            (tensor > 1, "parallel.tensor_parallel_degree = 1"),
            (pipeline > 1, "parallel.pipeline_parallel_degree = 1"),
            (experts > 1, "parallel.expert_parallel_degree = 1"),
            (elastic, "training.elastic_bits = false"),
            (parallel.reduce_schedule == ReduceSchedule::MicroBatch, "parallel.reduce_schedule = \"step\""),
            (parallel.reduce_dtype != ReduceDtype::F32, "parallel.reduce_dtype = \"f32\""),
            (codecs.iter().any(|codec| *codec != CompressionCodec::None), "no compression"),
            (offloads.iter().any(|tier| *tier != OffloadTier::None), "no memory.offload but that of activations"),
            (config.precision.compute == Compute::F16, "precision.compute = \"f32\" or \"bf16\""),
            (config.precision.fp8 != Fp8Recipe::Off, "precision.fp8 = \"off\""),
            (whole_matrices, "optimizer.name = \"adamw\", \"sgd\" or \"lion\", because servers own parts of matrices"),
            (config.health.on_spike != OnSpike::Warn, "health.on_spike = \"warn\""),
            (config.fine_tuning.adapter != AdapterMethod::None, "fine_tuning.adapter = \"none\""),
            (matches!(config.compute.device, DeviceKind::Cuda(_)), "compute.device = \"cpu\""),
        ];
        let lacks: Vec<&str> = lacks.iter().filter(|(asked, _)| *asked).map(|(_, need)| *need).collect();
        if !lacks.is_empty() {
            let message =
                format!("update.rule = \"server\" does not run with these settings: set {}", lacks.join("; "));
            self.problem("update.rule", message);
        }
    }
}
