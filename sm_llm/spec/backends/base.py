"""What every backend's options answer, so that no other module asks which backend a job is for."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

from pydantic import Field

from sm_llm.spec.base import SpecModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Self

    from sm_llm.errors import Issue
    from sm_llm.spec.machines.compute import ComputeSpec


class VpcSpec(SpecModel):
    """The network that managed jobs run in: both lists, or neither."""

    subnets: list[str] = Field(default_factory=list, max_length=16)
    """Subnet ids."""
    security_group_ids: list[str] = Field(default_factory=list, max_length=5)
    """Security group ids; for EFA one must allow all traffic to and from itself."""


class InstanceGroup(SpecModel):
    """Some of the nodes of a job of several instance types or reservations."""

    name: str = Field(min_length=1, max_length=64)
    """Name of the group."""
    instance_type: str
    """Machine to rent."""
    instance_count: int = Field(ge=1, le=10_000)
    """Nodes of the group; all groups together are compute.instance_count."""


class _HasBackend(Protocol):
    """A job: its class is made of the classes here."""

    @property
    def backend(self) -> BackendOptions: ...


class BackendOptions(SpecModel):
    """Options of one backend. A subclass has a field ``name: Literal["NAME"]``, and overrides what differs for it.

    The defaults are those of a cluster that is paid for and is not this machine.
    """

    runs_here: ClassVar[bool] = False
    """Whether jobs run on this machine, in this environment: its GPUs are theirs, its packages must be installed."""
    mounts_inputs: ClassVar[bool] = False
    """Whether the platform mounts inputs in S3 for the job, sharded or by a manifest where it is asked to."""
    secret_keeper: ClassVar[str] = "env"
    """Kind of secret reference that a remedy proposes; the worker of this backend must be able to read it."""
    account_fields: ClassVar[frozenset[str]] = frozenset()
    """Names of ``UserDefaults`` that fill options of the same name which a specification leaves out."""

    if TYPE_CHECKING:  # pydantic takes a property for what a field of the same name shadows

        @property
        def name(self) -> str:
            """The backend's name; in a subclass the field that distinguishes it from the others."""

        @property
        def stop_seconds(self) -> float:
            """Seconds from a request to stop until what still runs is killed; a field or property of a subclass."""

    @property
    def sees_this_machine(self) -> bool:
        """Whether an absolute path means the same folder for the job and for this machine."""
        return self.runs_here

    @property
    def seconds_until_stop(self) -> float | None:
        """When the worker stops in order because the platform will end the job, in seconds from the start of its
        process; None where nothing ends it."""
        return None

    @property
    def time_limit(self) -> str:
        """The time limit that ``seconds_until_stop`` follows from, and the option that sets it, in words."""
        return ""

    @property
    def node_groups(self) -> Sequence[InstanceGroup]:
        """Groups of nodes of several instance types; empty where all nodes are of ``compute.instance_type``."""
        return ()

    @property
    def read_locations(self) -> Mapping[str, str]:
        """Options that name a place in storage which jobs read beside their inputs: name of the option -> address."""
        return {}

    @classmethod
    def of(cls, job: _HasBackend) -> Self:
        """The options of a job that is for this backend: in its own package, whose jobs are for no other."""
        options = job.backend
        assert isinstance(options, cls)
        return options

    def compute_issues(self, compute: ComputeSpec) -> Iterator[Issue]:
        """Machines that this backend does not have, or of which it is not known how many processes a node runs.

        What else follows from the machines is checked only where there is no such issue.
        """
        # Named for subclasses: a backend of any machines has nothing to refuse.
        del compute
        return iter(())
