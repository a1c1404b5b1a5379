"""Checks manifests of `trainyard submit` against the schemas of their schedulers.

    python check.py MANIFEST.yaml ...

A Kubernetes manifest: its core objects, and the Job and the pod inside a JobSet, by the JSON schemas of
kubernetes-validate (strict: an unknown field is an error); the JobSet itself by the models that
kubeflow-trainer-api generates from JobSet's OpenAPI description. Those pass over unknown fields, so what they
give back is compared with what they were given. A SkyPilot task: by SkyPilot's own schema.
Prints `ok FILE KIND` or `refused FILE KIND: WHY` for each document.
"""

import sys

import kubernetes_validate
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet


def lost(before, after, path=""):
    """The first path of `before` that is missing or different in `after`."""
    if isinstance(before, dict):
        for key, value in before.items():
            if not isinstance(after, dict) or key not in after:
                return f"{path}.{key}"
            found = lost(value, after[key], f"{path}.{key}")
            if found:
                return found
        return None
    if isinstance(before, list):
        if not isinstance(after, list) or len(before) != len(after):
            return path
        pairs = zip(before, after)
        return next(filter(None, (lost(b, a, f"{path}[{i}]") for i, (b, a) in enumerate(pairs))), None)
    return None if before == after else path


def validated(document, version):
    kubernetes_validate.validate(document, version, strict=True)


def check_kubernetes(document, version):
    if document["kind"] != "JobSet":
        validated(document, version)
        return
    model = JobsetV1alpha2JobSet.from_dict(document)
    where = lost(document, model.to_dict())
    if where:
        raise ValueError(f"JobSet has no field {where}")
    for job in document["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        validated({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}, version)
        pod = spec["template"]
        validated({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod["spec"]}, version)


def check_skypilot(document):
    import jsonschema
    from sky.utils import schemas

    jsonschema.validate(document, schemas.get_task_schema())
    resources = dict(document["resources"])
    jsonschema.validate(resources, schemas.get_resources_schema())


def main():
    version = kubernetes_validate.latest_version()
    for path in sys.argv[1:]:
        with open(path) as file:
            for document in yaml.safe_load_all(file):
                kind = document.get("kind", "SkyPilot task")
                try:
                    if "kind" in document:
                        check_kubernetes(document, version)
                    else:
                        check_skypilot(document)
                    print(f"ok {path} {kind}")
                except Exception as error:  # every refusal is a line of the report
                    first = str(error).splitlines()[0] if str(error) else type(error).__name__
                    print(f"refused {path} {kind}: {first}")


if __name__ == "__main__":
    main()
