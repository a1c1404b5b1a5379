//! Manifests for Kubernetes: a ConfigMap with the configuration, a Secret, and a JobSet
//! (jobset.x-k8s.io/v1alpha2) of one indexed Job, whose pods are the hosts of the run.
//!
//! Ranks need each other, so one that fails ends its pod, and the JobSet starts all pods again
//! (`failurePolicy`). With a local queue of Kueue the JobSet begins suspended, and Kueue admits,
//! preempts and resumes it. In each case the pods get SIGTERM and the grace period to write a
//! checkpoint.

use super::{Submission, emit, object_name, quoted};
use crate::QueueError;
use serde_json::{Value, json};

/// Options that only Kubernetes has.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Options {
    /// The image with the program.
    pub image: String,
    /// The namespace.
    pub namespace: Option<String>,
    /// The local queue of Kueue.
    pub queue: Option<String>,
    /// The claim of the volume with the runs and the data, which is the working folder.
    pub claim: String,
    /// The secret that the ranks share; a note in its place is not for use.
    pub secret: String,
}

/// The folder at which the volume is mounted.
const WORKSPACE: &str = "/workspace";
/// The folder of the configuration.
const CONFIG: &str = "/etc/trainyard";
/// The port at which ranks meet.
const PORT: u32 = 29_400;

/// The manifest: three documents.
///
/// # Errors
///
/// The name leaves none for an object.
pub fn manifest(submission: &Submission, options: &Options) -> Result<String, QueueError> {
    let name = object_name(&submission.name)?;
    let documents =
        [config_map(submission, options, &name), secret(options, &name), job_set(submission, options, &name)];
    Ok(documents.iter().map(emit).collect::<Vec<_>>().join("---\n"))
}

fn metadata(options: &Options, name: &str, labels: Value) -> Value {
    let mut metadata = json!({ "name": name });
    if let Some(namespace) = &options.namespace {
        metadata["namespace"] = json!(namespace);
    }
    metadata["labels"] = labels;
    metadata
}

fn labels(name: &str) -> Value {
    json!({ "app.kubernetes.io/name": "trainyard", "app.kubernetes.io/instance": name })
}

fn config_map(submission: &Submission, options: &Options, name: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(options, name, labels(name)),
        "data": { "config.toml": submission.config },
    })
}

fn secret(options: &Options, name: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(options, name, labels(name)),
        "type": "Opaque",
        "stringData": { "secret": options.secret },
    })
}

/// The commands of a pod.
fn commands(submission: &Submission, name: &str) -> String {
    let Submission { nodes, ranks_per_node, program, .. } = submission;
    let setup: String = submission.setup.iter().map(|line| format!("{line}\n")).collect();
    let program = quoted(program);
    // A run that has not begun is begun by all pods or by none: its folder appears only after all
    // ranks have met.
    let start = match submission.ranks() {
        1 => format!("exec {program} train \"$@\"\n"),
        _ => format!(
            "exec {program} launch --nnodes {nodes} --node-rank \"$JOB_COMPLETION_INDEX\" --nproc-per-node {ranks_per_node} \\\n    \
             --master-addr {name}-workers-0-0.{name} --master-port {PORT} train \"$@\"\n"
        ),
    };
    format!(
        "set -eu\n\
         {setup}\
         run={}/{}\n\
         if [ -f \"$run/config.toml\" ]; then\n    \
         set -- --resume \"$run\"\n\
         else\n    \
         set -- {CONFIG}/config.toml{}\n\
         fi\n\
         {start}",
        quoted(&submission.directory),
        quoted(&submission.name),
        submission.settings(&quoted(&submission.name)),
    )
}

fn job_set(submission: &Submission, options: &Options, name: &str) -> Value {
    let Submission { nodes, ranks_per_node, cpus_per_rank, gpus_per_node, .. } = submission;
    let mut resources = json!({ "cpu": (ranks_per_node * cpus_per_rank).to_string() });
    if let Some(memory) = &submission.memory {
        resources["memory"] = json!(memory);
    }
    if *gpus_per_node > 0 {
        resources["nvidia.com/gpu"] = json!(gpus_per_node.to_string());
    }
    let mut pod = json!({
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": submission.margin_s,
        "containers": [{
            "name": "train",
            "image": options.image,
            "command": ["/bin/sh", "-c", commands(submission, name)],
            "workingDir": WORKSPACE,
            "env": [{
                "name": "TRAINYARD_JOB_SECRET",
                "valueFrom": { "secretKeyRef": { "name": name, "key": "secret" } },
            }],
            "ports": [{ "containerPort": PORT }],
            "resources": { "requests": resources, "limits": resources },
            "volumeMounts": [
                { "name": "workspace", "mountPath": WORKSPACE },
                { "name": "config", "mountPath": CONFIG },
            ],
        }],
        "volumes": [
            { "name": "workspace", "persistentVolumeClaim": { "claimName": options.claim } },
            { "name": "config", "configMap": { "name": name } },
        ],
    });
    if let Some(gpu) = &submission.gpu {
        pod["nodeSelector"] = json!({ "nvidia.com/gpu.product": gpu });
    }
    let mut all_labels = labels(name);
    if let Some(queue) = &options.queue {
        all_labels["kueue.x-k8s.io/queue-name"] = json!(queue);
    }
    let mut spec = json!({
        "network": { "enableDNSHostnames": true, "subdomain": name },
        "failurePolicy": { "maxRestarts": submission.restarts },
        "replicatedJobs": [{
            "name": "workers",
            "replicas": 1,
            "template": {
                "spec": {
                    "parallelism": nodes,
                    "completions": nodes,
                    "completionMode": "Indexed",
                    "backoffLimit": 0,
                    "template": { "metadata": { "labels": labels(name) }, "spec": pod },
                },
            },
        }],
    });
    if options.queue.is_some() {
        // Kueue admits it.
        spec["suspend"] = json!(true);
    }
    json!({
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata(options, name, all_labels),
        "spec": spec,
    })
}

#[cfg(test)]
mod tests {
    use super::super::testing::submission;
    use super::*;

    #[test]
    fn a_manifest_is_as_agreed() {
        let options = Options {
            image: "registry.example/trainyard:1".to_owned(),
            namespace: Some("lab".to_owned()),
            queue: Some("night".to_owned()),
            claim: "runs".to_owned(),
            secret: "0123".to_owned(),
        };
        let gpus = Submission { gpus_per_node: 8, memory: Some("64Gi".to_owned()), sets: Vec::new(), ..submission() };
        let expected = r#"apiVersion: v1
kind: ConfigMap
metadata:
  name: my-run
  namespace: lab
  labels:
    app.kubernetes.io/name: trainyard
    app.kubernetes.io/instance: my-run
data:
  config.toml: |
    [training]
    steps = 9
---
apiVersion: v1
kind: Secret
metadata:
  name: my-run
  namespace: lab
  labels:
    app.kubernetes.io/name: trainyard
    app.kubernetes.io/instance: my-run
type: Opaque
stringData:
  secret: "0123"
---
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: my-run
  namespace: lab
  labels:
    app.kubernetes.io/name: trainyard
    app.kubernetes.io/instance: my-run
    kueue.x-k8s.io/queue-name: night
spec:
  network:
    enableDNSHostnames: true
    subdomain: my-run
  failurePolicy:
    maxRestarts: 3
  replicatedJobs:
    - name: workers
      replicas: 1
      template:
        spec:
          parallelism: 2
          completions: 2
          completionMode: Indexed
          backoffLimit: 0
          template:
            metadata:
              labels:
                app.kubernetes.io/name: trainyard
                app.kubernetes.io/instance: my-run
            spec:
              restartPolicy: Never
              terminationGracePeriodSeconds: 75
              containers:
                - name: train
                  image: "registry.example/trainyard:1"
                  command:
                    - /bin/sh
                    - "-c"
                    - |
                      set -eu
                      run=runs/my-run
                      if [ -f "$run/config.toml" ]; then
                          set -- --resume "$run"
                      else
                          set -- /etc/trainyard/config.toml --set compute.device=cuda --set run.name=my-run
                      fi
                      exec trainyard launch --nnodes 2 --node-rank "$JOB_COMPLETION_INDEX" --nproc-per-node 2 \
                          --master-addr my-run-workers-0-0.my-run --master-port 29400 train "$@"
                  workingDir: /workspace
                  env:
                    - name: TRAINYARD_JOB_SECRET
                      valueFrom:
                        secretKeyRef:
                          name: my-run
                          key: secret
                  ports:
                    - containerPort: 29400
                  resources:
                    requests:
                      cpu: "8"
                      memory: "64Gi"
                      nvidia.com/gpu: "8"
                    limits:
                      cpu: "8"
                      memory: "64Gi"
                      nvidia.com/gpu: "8"
                  volumeMounts:
                    - name: workspace
                      mountPath: /workspace
                    - name: config
                      mountPath: /etc/trainyard
              volumes:
                - name: workspace
                  persistentVolumeClaim:
                    claimName: runs
                - name: config
                  configMap:
                    name: my-run
  suspend: true
"#;
        assert_eq!(manifest(&gpus, &options).unwrap(), expected);
    }

    #[test]
    fn one_rank_needs_no_launcher_and_no_queue() {
        let one = Submission { nodes: 1, ranks_per_node: 1, gpu: Some("H100".to_owned()), ..submission() };
        let text = manifest(&one, &Options { claim: "runs".to_owned(), ..Options::default() }).unwrap();
        assert!(text.contains("exec trainyard train \"$@\"\n") && !text.contains("launch"), "{text}");
        assert!(text.contains("nodeSelector:\n                nvidia.com/gpu.product: H100\n"), "{text}");
        assert!(!text.contains("suspend") && !text.contains("namespace"), "{text}");
        assert!(manifest(&Submission { name: "42".to_owned(), ..one }, &Options::default()).is_err());
    }
}
