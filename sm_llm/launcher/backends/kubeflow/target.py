"""What is decided for a job on Kubernetes before its manifest is written, and what stands against it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sm_llm.errors import Issue, SpecError, warning
from sm_llm.launcher.backends.cluster_program import PROGRAM_CHECKERS
from sm_llm.launcher.backends.kubeflow import names
from sm_llm.launcher.job_inputs import output_folders
from sm_llm.launcher.planning.bundle import local_source
from sm_llm.launcher.planning.plan import Checks
from sm_llm.optional import missing
from sm_llm.spec.backends.kubeflow import KubeflowOptions
from sm_llm.spec.derive import derive_task
from sm_llm.spec.inputs import FileSystemInput, input_location
from sm_llm.spec.job_machines import machines, network_environment
from sm_llm.spec.references import sources
from sm_llm.spec.tasks import ScriptTask, TrainTask, starts_ranks
from sm_llm.spec.training import StreamData
from sm_llm.spec.validation.runner import errors_of, run
from sm_llm.storage.uri import fill, parse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sm_llm.launcher.planning.plan import Plan
    from sm_llm.launcher.planning.source_tree import SourceTree
    from sm_llm.spec.job import JobSpec
    from sm_llm.spec.machines.hardware import Instance
    from sm_llm.spec.validation.runner import Checker

MAX_RESTARTS = 20
HANG_MINUTES, FIRST_STEP_MINUTES = 30, 120
MIN_PODS_WAIT_SECONDS = 120
# NeuronCores of a Neuron device, as the runtime counts them.
_CORES_OF_DEVICE = {"trn1": 2, "trn1n": 2, "trn2": 4}
# Names under which the device plugins of NVIDIA and AWS offer what a node has.
_NVIDIA, _NEURON, _NEURON_CORES = "nvidia.com/gpu", "aws.amazon.com/neurondevice", "aws.amazon.com/neuroncore"
_EFA = "vpc.amazonaws.com/efa"


@dataclass(frozen=True)
class KubeflowTarget:
    """The decisions for one job."""

    pods: int
    processes: int
    """Per pod."""
    resources: tuple[tuple[str, str], ...]
    """What each pod asks for: resource name and quantity."""
    environment: tuple[tuple[str, str], ...]
    """By the facts of the instance type."""
    devices: str
    """``nvidia:8`` or ``neuron:16``: what every pod must have; empty where that is not known."""
    node_selector: tuple[tuple[str, str], ...]
    max_restarts: int | None
    """None where nobody starts the job again."""
    hang_seconds: int | None
    """None where nobody watches the log."""
    first_step_seconds: int | None
    last_line: str
    """Pattern of the last training line, after which nobody watches the log; empty where it is not known."""
    facts: dict[str, str]
    """The decisions in words."""
    entry: str
    program: SourceTree | None = None
    """The files of the user's program, where they are on this machine."""
    sizes: tuple[int, ...] = ()
    """Numbers of pods that a training may continue with; empty where it needs all."""
    wait_seconds: int = MIN_PODS_WAIT_SECONDS
    """So long pods wait for those that are missing, before they continue with fewer."""
    global_batch_size: int | None = None
    """Sequences in a step, whatever the number of pods; None where that does not change."""

    @property
    def command(self) -> tuple[tuple[str, ...], ...]:
        """What runs in every pod; the rendezvous follows from the pods that the operator starts."""
        argv = ("torchrun", f"--nnodes={self.pods}", f"--nproc-per-node={self.processes}")
        return tuple((*argv, f"--node-rank={pod}", self.entry) for pod in range(self.pods))


@dataclass(frozen=True)
class Asked:
    """A job, and what it asks of the cluster."""

    job: JobSpec
    options: KubeflowOptions
    program: SourceTree | None
    """The files of the user's program, where they are on this machine."""

    @property
    def row(self) -> Instance | None:
        """The instance type, where the table knows it."""
        return next(iter(machines(self.job)), None)

    @property
    def accelerators(self) -> int:
        """Devices that each pod asks for."""
        given, row = self.options.accelerators_per_pod, self.row
        if given is not None or row is None:
            return given or 0
        return self.devices_of(row)

    def devices_of(self, row: Instance) -> int:
        """Devices of a node, as the device plugin counts them."""
        is_device = row.is_neuron and self.resource != _NEURON_CORES
        return row.accelerators // _CORES_OF_DEVICE[row.family] if is_device else row.accelerators

    @property
    def resource(self) -> str:
        """Resource name of the devices."""
        is_neuron = self.row is not None and self.row.is_neuron
        return self.options.accelerator_resource or (_NEURON if is_neuron else _NVIDIA)

    @property
    def has_whole_node(self) -> bool:
        """Whether a pod takes all devices of its node."""
        return self.row is not None and self.accelerators == self.devices_of(self.row)

    @property
    def efa(self) -> int:
        """EFA interfaces that each pod asks for."""
        if self.options.efa_per_pod is not None:
            return self.options.efa_per_pod
        # One pod has nobody to talk to, and pods that share a node cannot have all of its interfaces.
        several = self.job.compute.instance_count > 1
        return self.row.efa_cards if self.row is not None and several and self.has_whole_node else 0


def plan_checks(plan: Plan) -> Checks:
    """What is decided for a job, and every issue of it. Contacts nothing."""
    job = plan.job
    # Listed once: the checks and the bundle must see the same files.
    program = local_source(job.task.source) if isinstance(job.task, ScriptTask) else None
    asked = Asked(job, KubeflowOptions.of(job), program)
    issues = run(BACKEND_CHECKERS, asked)
    issues += run(PROGRAM_CHECKERS, asked, issues)
    lacking = missing("kubernetes")
    # Known before anything is stored, and shown by a plan all the same.
    unsupported = () if lacking is None else (Issue("kubernetes-client-missing", "backend.name", lacking, "kubeflow"),)
    target = None if errors_of(issues) else _decide(asked, plan)
    return Checks(target, tuple(issues), unsupported)


def _decide(asked: Asked, plan: Plan) -> KubeflowTarget:
    job, options = asked.job, asked.options
    restarts = None if options.retry == "none" else options.max_restarts or MAX_RESTARTS
    # Other tasks and programs print no training line, so their silence means nothing.
    watches = options.resource == "HyperPodPyTorchJob" and isinstance(job.task, TrainTask)
    # Of streamed data the number of steps is not known before the training.
    total = plan.derived.total_steps if plan.derived else None
    return KubeflowTarget(
        pods=job.compute.instance_count,
        # What starts no ranks runs once in each pod.
        processes=job.compute.processes if starts_ranks(job.task) else 1,
        resources=tuple(_resources(asked)),
        environment=tuple(_environment(asked).items()),
        devices=_devices(asked),
        node_selector=tuple(_node_selector(asked).items()),
        max_restarts=restarts,
        hang_seconds=60 * (options.hang_minutes or HANG_MINUTES) if watches else None,
        first_step_seconds=60 * (options.first_step_minutes or FIRST_STEP_MINUTES) if watches else None,
        last_line=f".*step {total}/{total} .*" if total else "",
        facts=_facts(asked, restarts),
        entry=f"{job.task.kind}.py",
        program=asked.program,
        sizes=tuple(_sizes(asked)),
        wait_seconds=options.min_pods_wait_seconds or MIN_PODS_WAIT_SECONDS,
        global_batch_size=_global_batch_size(asked) if options.min_pods is not None else None,
    )


def _global_batch_size(asked: Asked) -> int | None:
    """Sequences in a step of a training with all pods."""
    job = asked.job
    if not isinstance(job.task, TrainTask):
        return None
    return derive_task(job.task, job.compute.world_size, node_size=job.compute.processes).global_batch_size


def _sizes(asked: Asked) -> Iterator[int]:
    """The numbers of pods between ``min_pods`` and all that can work through the same steps."""
    job, fewest = asked.job, asked.options.min_pods
    batch = _global_batch_size(asked)
    if fewest is None or not isinstance(job.task, TrainTask) or batch is None:
        return
    task = job.task.model_copy(update={"global_batch_size": batch})
    for pods in range(fewest, job.compute.instance_count + 1):
        try:
            derive_task(task, pods * job.compute.processes, node_size=job.compute.processes)
        except SpecError:
            continue
        yield pods


def _resources(asked: Asked) -> Iterator[tuple[str, str]]:
    options = asked.options
    if asked.accelerators:
        yield asked.resource, str(asked.accelerators)
    if asked.efa:
        yield _EFA, str(asked.efa)
    if options.cpus_per_pod is not None:
        yield "cpu", str(options.cpus_per_pod)
    if options.memory_gib_per_pod is not None:
        yield "memory", f"{options.memory_gib_per_pod}Gi"


def _environment(asked: Asked) -> dict[str, str]:
    # A pod without an EFA interface must not be set to use one: libfabric would find no provider.
    return network_environment(asked.job, has_efa=asked.efa > 0)


def _devices(asked: Asked) -> str:
    row = asked.row
    # A pod with some cores of a device sees a number of device files that depends on how they are spread.
    if row is None or not asked.accelerators or asked.resource == _NEURON_CORES:
        return ""
    return f"{'neuron' if row.is_neuron else 'nvidia'}:{asked.accelerators}" if row.accelerator is not None else ""


def _node_selector(asked: Asked) -> dict[str, str]:
    options, found = asked.options, {}
    if asked.job.compute.instance_type is not None and options.instance_label != "none":
        name = asked.job.compute.instance_type
        found[names.INSTANCE_LABEL] = name.removeprefix("ml.") if options.instance_label == "ec2" else name
    if options.node_health != "any":
        found[names.HEALTH_LABEL] = "Schedulable"
    if options.node_health == "deep-checked":
        found[names.DEEP_CHECK_LABEL] = "Passed"
    # Last: who names a label himself means it, the instance type included.
    return {**found, **options.node_selector}


def _facts(asked: Asked, restarts: int | None) -> dict[str, str]:
    options = asked.options
    again = {
        "operator": f"the operator starts the pods again, {restarts} times at most",
        "auto-resume": f"HyperPod replaces faulty nodes and starts the job again, {restarts} times at most",
        "none": "nobody starts the job again",
    }
    asks = ", ".join(f"{quantity} {name}" for name, quantity in _resources(asked)) or "nothing in particular"
    return {
        "cluster": options.context or "the kubeconfig's current context",
        "namespace": options.namespace,
        "resource": options.resource,
        "image": options.image,
        "a pod asks for": asks,
        "nodes": ", ".join(f"{name}={value}" for name, value in _node_selector(asked).items()) or "any",
        "queue": options.queue or "none",
        **({} if options.min_pods is None else {"continues with": f"{', '.join(map(str, _sizes(asked)))} pods"}),
        "after a fault": again[options.retry],
    }


def check_resource(asked: Asked) -> Iterator[Issue]:
    """What one of the two operators does not offer, or only under conditions."""
    options = asked.options
    if options.retry == "auto-resume":
        if options.resource != "PyTorchJob":
            problem = "is of PyTorchJobs; HyperPod's own operator replaces nodes by itself"
            yield Issue(
                "retry-of-other-resource", "backend.retry", problem, options.retry, "Use backend.retry=operator"
            )
        # HyperPod's agent watches these namespaces alone.
        elif options.namespace != "kubeflow" and not options.namespace.startswith("hyperpod"):
            problem = "must be kubeflow, or begin with hyperpod, for backend.retry=auto-resume"
            remedy = "Name such a namespace, or use backend.retry=operator"
            yield Issue("namespace-without-auto-resume", "backend.namespace", problem, options.namespace, remedy)
        # AWS asks for the label, so that a restarted pod does not return to the faulty node.
        if options.node_health == "any":
            problem = "must be schedulable or deep-checked for backend.retry=auto-resume"
            remedy = "Set backend.node_health=schedulable"
            yield Issue("auto-resume-without-health", "backend.node_health", problem, options.node_health, remedy)


def check_effects(asked: Asked) -> Iterator[Issue]:
    """Options that are set and have no effect beside others."""
    options = asked.options
    watched = options.resource == "HyperPodPyTorchJob" and isinstance(asked.job.task, TrainTask)
    found = {
        "priority": ("backend.queue", options.queue is None),
        "topology": ("backend.queue", options.queue is None),
        "max_restarts": ("backend.retry=operator or auto-resume", options.retry == "none"),
        "hang_minutes": ("backend.resource=HyperPodPyTorchJob and a train task", not watched),
        "first_step_minutes": ("backend.resource=HyperPodPyTorchJob and a train task", not watched),
        "accelerator_resource": ("accelerators", not asked.accelerators),
        "min_pods_wait_seconds": ("backend.min_pods", options.min_pods is None),
    }
    for name, (needed, is_idle) in found.items():
        if is_idle and (value := getattr(options, name)) is not None:
            problem = f"has no effect without {needed}"
            yield Issue(
                "kubeflow-option-without-effect", f"backend.{name}", problem, value, "Leave it out, or set both"
            )
    if asked.job.compute.instance_type is None and options.instance_label == "ec2":
        problem, remedy = "has no effect without compute.instance_type", "Set both"
        yield Issue("kubeflow-option-without-effect", "backend.instance_label", problem, "ec2", remedy)
    # By its value: in a run's record, from which it is resumed, every field is set.
    if options.topology is None and options.topology_mode != type(options).model_fields["topology_mode"].default:
        problem = "has no effect without backend.topology"
        yield Issue(
            "kubeflow-option-without-effect", "backend.topology_mode", problem, options.topology_mode, "Set both"
        )


def check_elastic(asked: Asked) -> Iterator[Issue]:
    """Trainings that cannot continue with fewer pods, or not the same way."""
    job, fewest, path = asked.job, asked.options.min_pods, "backend.min_pods"
    if fewest is None:
        return
    if not isinstance(job.task, TrainTask) or asked.options.resource != "PyTorchJob":
        problem, remedy = "is of trainings in PyTorchJobs", "Leave it out"
        yield Issue("elastic-not-possible", path, problem, fewest, remedy)
    elif isinstance(job.task.data, StreamData):
        # Every process has a place of its own in the stream, and reads on from there.
        problem = "does not go with streamed data: another number of processes cannot continue their places in it"
        yield Issue("elastic-stream", path, problem, fewest, "Leave it out, or prepare the text as rows")
    elif fewest >= job.compute.instance_count:
        problem = f"must be less than compute.instance_count, which is {job.compute.instance_count}"
        yield Issue("elastic-without-effect", path, problem, fewest, "Lower it, or leave it out")
    elif asked.options.retry == "none":
        problem = "needs pods that start again"
        yield Issue("elastic-without-restarts", path, problem, fewest, "Use backend.retry=operator")
    elif fewest not in (sizes := list(_sizes(asked))):
        problem = f"does not divide the global batch of {_global_batch_size(asked)} sequences"
        remedy = f"Numbers of pods that do: {', '.join(map(str, sizes))}; or set task.global_batch_size"
        yield Issue("elastic-batch", path, problem, fewest, remedy)


def check_accelerators(asked: Asked) -> Iterator[Issue]:
    """Devices and processes that do not go together."""
    job, row, count = asked.job, asked.row, asked.accelerators
    path = "backend.accelerators_per_pod"
    if row is not None and count > asked.devices_of(row):
        problem = f"must be at most {asked.devices_of(row)}, what {row.name} has"
        yield Issue("accelerators-not-there", path, problem, count, "Use more pods: compute.instance_count")
        return
    if row is not None and asked.efa > row.efa_cards:
        problem = f"must be at most {row.efa_cards}, what {row.name} has"
        yield Issue("efa-not-there", "backend.efa_per_pod", problem, asked.efa, "Leave it out")
    if not starts_ranks(job.task) or not count:
        if starts_ranks(job.task) and job.compute.instance_type is not None and row is None:
            message = "is not set, and the instance type is not in the table: the pods ask for no accelerators"
            yield warning("pods-without-accelerators", path, message)
        return
    per_device = _CORES_OF_DEVICE.get(row.family, 1) if row is not None and asked.resource != _NEURON_CORES else 1
    # Of an unknown device it is not known how many processes it serves.
    if row is not None and job.compute.processes > count * per_device:
        problem = f"must be at most {count * per_device}, what a pod of {count} {asked.resource} can run"
        remedy = "Set both, or leave backend.accelerators_per_pod out"
        yield Issue(
            "processes-beyond-accelerators", "compute.processes_per_instance", problem, job.compute.processes, remedy
        )


def check_tolerations(asked: Asked) -> Iterator[Issue]:
    """Tolerations that Kubernetes refuses."""
    for index, it in enumerate(asked.options.tolerations):
        path = f"backend.tolerations.{index}"
        if it.key is None and it.operator != "Exists":
            yield Issue(
                "toleration-invalid", f"{path}.operator", "must be Exists without a key", it.operator, "Name it"
            )
        if it.operator == "Exists" and it.value is not None:
            yield Issue("toleration-invalid", f"{path}.value", "must be left out with operator Exists", it.value, "")


_TAKEN = (names.PACKAGE_PATH, names.SHARED_MEMORY, names.SECRETS, names.ACCOUNT, names.MESSAGE, *names.RUNTIME)


def check_volumes(asked: Asked) -> Iterator[Issue]:
    """Claims at places that are taken, and a folder of the nodes that is the system's."""
    seen: set[str] = set()
    for index, it in enumerate(asked.options.volumes):
        problem = "is given twice" if it.path in seen else _taken(it.path)
        if problem is not None:
            yield Issue("mount-taken", f"backend.volumes.{index}.path", problem, it.path, "Name another folder")
        seen.add(it.path)
    folder = asked.options.node_folder
    # Large files would lie between those of the system, and every pod of the node would see all of it.
    if folder is not None and (found := _taken(folder)) is not None:
        remedy = "Name a folder of the node's own disk, like /opt/dlami/nvme"
        yield Issue("node-folder-taken", "backend.node_folder", found, folder, remedy)


def _taken(path: str) -> str | None:
    """What a mount at ``path`` would hide, or could not be made beside; None where it is free."""
    # In both directions: a mount above one of these would hide it.
    taken = next((it for it in _TAKEN if _is_below(path, it) or _is_below(it, path)), None)
    if taken is not None:
        return f"is taken: {taken} is there"
    hidden = next((it for it in names.IMAGE if _is_below(it, path)), None)
    return None if hidden is None else f"would hide {hidden}, and no program would start"


def _is_below(path: str, folder: str) -> bool:
    return f"{path.rstrip('/')}/".startswith(f"{folder.rstrip('/')}/")


def check_locations(asked: Asked) -> Iterator[Issue]:
    """Places that the pods do not see, or that end with a pod."""
    job = asked.job
    storage = parse(fill(job.storage, run_name=job.name)).path
    if storage is not None:
        yield from _mount_issue(asked, "storage", str(storage), job.storage, writes=True)
    for path, location in {**sources(job), **_inputs(job)}.items():
        if location.startswith("/"):
            # RUN@STEP is a checkpoint in the folder RUN.
            yield from _mount_issue(asked, path, location.rpartition("@")[0] or location, location)
        elif _is_of_this_machine(location) and not _is_packed(asked, path):
            remedy = "Give its address in S3, or its path on a volume of backend.volumes"
            yield Issue("place-not-in-pods", path, "is a folder of this machine", location, remedy)
    for path, folder in output_folders(job).items():
        yield from _mount_issue(asked, path, str(folder), str(folder), writes=True)
    for name, value in job.inputs.items():
        if isinstance(value, FileSystemInput):
            remedy = "Mount it as a claim: backend.volumes"
            yield Issue("place-not-in-pods", f"inputs.{name}", "cannot be mounted by a pod", value.uri, remedy)
    if (disk := job.environment.get("SM_LLM_SCRATCH_DISK")) is not None:
        yield from _mount_issue(asked, "environment.SM_LLM_SCRATCH_DISK", disk, disk, writes=True)


def _inputs(job: JobSpec) -> dict[str, str]:
    plain = ((name, value) for name, value in job.inputs.items() if not isinstance(value, FileSystemInput))
    return {f"inputs.{name}": input_location(value) for name, value in plain}


def _is_of_this_machine(location: str) -> bool:
    return "://" not in location and not location.startswith(("builtin:", "steps.", "inputs."))


def _is_packed(asked: Asked, path: str) -> bool:
    """Whether a place of this machine travels in the code bundle."""
    return path == "task.source" and asked.program is not None


def _mount_issue(asked: Asked, path: str, location: str, value: str, *, writes: bool = False) -> Iterator[Issue]:
    """The issue of a folder that lies on no claim: what is written there is lost with the pod."""
    if _is_packed(asked, path):
        return
    mounts = [it for it in asked.options.volumes if _is_below(location, it.path)]
    if not mounts:
        problem = "lies on no volume of the pods, and is lost with them" if writes else "lies on no volume of the pods"
        remedy = "Use an address in S3, or mount its file system: backend.volumes"
        yield Issue("place-on-no-mount", path, problem, value, remedy)
    # Of nested mounts the innermost holds the folder.
    elif writes and max(mounts, key=lambda it: len(it.path)).read_only:
        yield Issue("place-read-only", path, "lies on a volume that is mounted read-only", value, "Mount it writable")


def check_secrets(asked: Asked) -> Iterator[Issue]:
    """Secrets of the machine that submits the job, which pods do not get."""
    for name, reference in asked.job.secrets.items():
        if reference.startswith("env:"):
            problem = "cannot be read by a pod: it gets nothing of the environment that submits the job"
            remedy = "Use k8s:SECRET/KEY, secretsmanager:ARN or ssm:NAME"
            yield Issue("secret-not-in-pods", f"secrets.{name}", problem, reference, remedy)
        elif reference.startswith("file:"):
            location = reference.removeprefix("file:")
            yield from _mount_issue(asked, f"secrets.{name}", location, reference)


def check_use(asked: Asked) -> Iterator[Issue]:
    """What works, but is probably not meant."""
    job, options = asked.job, asked.options
    if options.retry == "none":
        message = "after a fault of a node the run waits until fit is called again"
        yield warning("pods-not-retried", "backend.retry", message)
    if job.compute.instance_type is None and starts_ranks(job.task) and job.compute.processes_per_instance is None:
        message = "is not set, and no instance type: each pod runs one process"
        yield warning("one-process-of-a-pod", "compute.processes_per_instance", message)
    if options.priority is None and options.queue is not None and options.namespace.startswith("hyperpod"):
        message = "is not set: HyperPod's dashboard does not show the job"
        yield warning("queue-without-priority", "backend.priority", message)


BACKEND_CHECKERS: tuple[Checker[Asked], ...] = (
    check_resource,
    check_effects,
    check_elastic,
    check_accelerators,
    check_tolerations,
    check_volumes,
    check_locations,
    check_secrets,
    check_use,
)
