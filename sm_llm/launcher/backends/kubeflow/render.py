"""Renders a plan as the objects of a job: a ConfigMap with job.json, and the custom resource."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml

from sm_llm.launcher.backend import Submission
from sm_llm.launcher.backends.kubeflow import names
from sm_llm.launcher.backends.kubeflow.manifest import Code, config_map, custom_resource
from sm_llm.launcher.backends.kubeflow.target import KubeflowTarget
from sm_llm.launcher.images.images import lock_text, stack_of
from sm_llm.launcher.planning.bundle import SOURCE_FOLDER, make_bundle
from sm_llm.spec.backends.kubeflow import KubeflowOptions
from sm_llm.storage.uri import join

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sm_llm.contract.job_file import JobFile
    from sm_llm.launcher.planning.plan import Plan


def render(plan: Plan, job: JobFile) -> Submission:
    """The objects of a job, and the code bundle that its pods fetch. Reads files of this machine, nothing else."""
    target = plan.target
    assert isinstance(target, KubeflowTarget)
    options = KubeflowOptions.of(job.spec)
    bundle = make_bundle(target.program, lock_text(stack_of(job.spec)))
    # Beside the runs, because runs of one version of the code share it; a step's own lies at RUN/steps/STEP.
    root = job.run_uri.rsplit("/", 1 if plan.step is None else 3)[0]
    address = join(root, "bundles", bundle.key)
    inside = _seen_by_pods(job, target)
    name = names.object_name(job.run_id)
    manifests = [
        config_map(inside, name, options),
        custom_resource(inside, name, target, Code(address, bundle.digest), is_step=plan.step is not None),
    ]
    request = {"context": options.context, "namespace": options.namespace, "manifests": manifests}
    return Submission("kubeflow", inside, request, {address: bundle.archive}, document(manifests))


def document(manifests: Sequence[dict[str, Any]]) -> str:
    """The manifests as ``kubectl apply -f -`` reads them."""
    return yaml.dump_all(
        manifests, Dumper=_Dumper, explicit_start=True, sort_keys=False, allow_unicode=True, width=1 << 20
    )


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        """The templates of master and workers are written out, as people expect them."""
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    # Always quoted: kubectl's YAML takes words for numbers and booleans that Python's does not.
    # At line feeds alone: other breaks of Unicode are no characters to print, and YAML would end lines at some.
    lines = value.removesuffix("\n").split("\n")
    is_block = len(lines) > 1 and value.endswith("\n") and all(it.isprintable() and it == it.rstrip() for it in lines)
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if is_block else '"')


def _mapping(dumper: yaml.SafeDumper, value: dict[str, Any]) -> yaml.MappingNode:
    pairs = [(yaml.ScalarNode("tag:yaml.org,2002:str", key), dumper.represent_data(it)) for key, it in value.items()]
    return yaml.MappingNode("tag:yaml.org,2002:map", pairs, flow_style=False)


_Dumper.add_representer(str, _text)
_Dumper.add_representer(dict, _mapping)


def _seen_by_pods(job: JobFile, target: KubeflowTarget) -> JobFile:
    """The job as the workers read it: the user's program is in the bundle, and the global batch is that of all pods."""
    changes: dict[str, Any] = {}
    if target.program is not None:
        changes["source"] = f"{names.CODE}/{SOURCE_FOLDER}"
    if target.global_batch_size is not None:
        changes["global_batch_size"] = target.global_batch_size
    spec = job.spec
    if changes:
        task = {**job.spec.task.model_dump(), **changes}
        spec = job.spec.model_copy(update={"task": type(job.spec.task).model_validate(task)})
    # Nothing is mounted as a channel: every place is read where it lies.
    return job.model_copy(update={"spec": spec, "channels": {}})
