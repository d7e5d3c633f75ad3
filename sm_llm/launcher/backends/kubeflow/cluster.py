"""The one adapter of the official Kubernetes client: objects as plain dictionaries, errors in our words.

Only here is the package ``kubernetes`` imported, inside of functions, since it takes more than a second.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

from sm_llm.errors import QueryError, SubmitError
from sm_llm.launcher.backends.kubeflow.manifest import KINDS, Kind
from sm_llm.launcher.backends.kubeflow.names import IN_CLUSTER, JOB_LABEL
from sm_llm.optional import command, missing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# Major versions of the client, which follow those of Kubernetes.
SUPPORTED = range(35, 36)
"""Major versions of the client that this adapter is made for; ``setup.cfg`` pins the same."""
# To connect, and to read an answer.
TIMEOUT_SECONDS = (10.0, 60.0)
"""To connect, and between two parts of an answer."""
_TRIES, _PAUSE_SECONDS = 4, 1.0
DELETE_SECONDS = 300.0
_POLL_SECONDS = 0.5
# Too many requests, and faults of the API server or a proxy before it: nothing is known of the request.
_TRANSIENT = (429, 500, 502, 503, 504)
_LOCATIONS = {
    **KINDS,
    "Job": Kind("batch", "v1", "jobs"),
    "Pod": Kind("", "v1", "pods"),
    "Role": Kind("rbac.authorization.k8s.io", "v1", "roles"),
    "RoleBinding": Kind("rbac.authorization.k8s.io", "v1", "rolebindings"),
    "ServiceAccount": Kind("", "v1", "serviceaccounts"),
}
INSTALL = {
    "PyTorchJob": "kubectl apply --server-side -k "
    "'github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=v1.8.1'",
    "HyperPodPyTorchJob": "aws eks create-addon --addon-name amazon-sagemaker-hyperpod-training-operator "
    "--cluster-name NAME",
}
"""The command that installs the operator of a kind."""


class Refused(SubmitError):
    """The API server's answer: it did nothing. ``status`` is that of HTTP."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class KubernetesCluster:
    """One cluster, by a context of the kubeconfig, or the one that this process runs in."""

    name: str
    """Of the context, as native ids hold it."""
    connect: Callable[[], Any]
    """Makes a client with fresh credentials."""
    sleep: Callable[[float], None] = time.sleep
    _client: Any = field(default=None, repr=False)

    def job(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        """A job, of whatever kind; None where there is none. Raises ``QueryError`` without an answer."""
        return self._get(self._objects(kind, namespace, name))

    def pods(self, namespace: str, job: str) -> list[dict[str, Any]]:
        """The pods of a job, those of an earlier attempt that are still ending included."""
        # By our own label: the operators' labels differ, and changed between releases.
        found = self._call("GET", f"/api/v1/namespaces/{namespace}/pods", {"labelSelector": f"{JOB_LABEL}={job}"})
        return list(found.get("items") or ())

    def events(self, namespace: str, name: str) -> list[dict[str, Any]]:
        """What the cluster's controllers report of an object, oldest first."""
        fields = {"fieldSelector": f"involvedObject.name={name}"}
        found = self._call("GET", f"/api/v1/namespaces/{namespace}/events", fields)
        return sorted(found.get("items") or (), key=lambda it: str(it.get("lastTimestamp") or ""))

    def create(self, manifest: Mapping[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        """Create an object; returns it as the cluster holds it. Raises ``Refused``."""
        path = self._objects(str(manifest["kind"]), str(manifest["metadata"]["namespace"]))
        found: dict[str, Any] = self._call("POST", path, {"dryRun": "All"} if dry_run else {}, manifest)
        return found

    def delete_job(self, kind: str, namespace: str, name: str) -> None:
        """Delete a job with its pods; returns at once. One that is gone is left alone."""
        # The job is kept until what it owns is gone, so that its end is the end of its pods.
        self._delete(self._objects(kind, namespace, name), {"propagationPolicy": "Foreground"})

    def await_deleted(self, kind: str, namespace: str, name: str, seconds: float = DELETE_SECONDS) -> None:
        """Wait until a job that was deleted is gone. Raises ``SubmitError`` when it takes too long."""
        deadline = time.monotonic() + seconds
        while self.job(kind, namespace, name) is not None:
            if time.monotonic() > deadline:
                raise SubmitError(
                    f"{kind} {name} in {namespace} is being deleted for {seconds:.0f} s. See what holds it: "
                    f"kubectl -n {namespace} describe {kind.lower()} {name}"
                )
            self.sleep(_POLL_SECONDS)

    def delete_pod(self, namespace: str, name: str, *, now: bool = False) -> None:
        """Delete a pod; ``now`` leaves it no time to end."""
        self._delete(f"/api/v1/namespaces/{namespace}/pods/{name}", {"gracePeriodSeconds": 0} if now else {})

    def put_config_map(self, manifest: Mapping[str, Any]) -> None:
        """Create a ConfigMap, or replace it."""
        body = manifest["metadata"]
        path = f"/api/v1/namespaces/{body['namespace']}/configmaps"
        try:
            self._call("POST", path, {}, manifest)
        except Refused as error:
            # 409: it is there from a try of this attempt that was broken off.
            if error.status != 409:
                raise
            self._call("PUT", f"{path}/{body['name']}", {}, manifest)

    def own_config_map(self, namespace: str, name: str, owner: Mapping[str, Any]) -> None:
        """Let a ConfigMap be deleted with the job that reads it."""
        reference = {
            "apiVersion": owner["apiVersion"], "kind": owner["kind"], "name": owner["metadata"]["name"],
            "uid": owner["metadata"]["uid"], "blockOwnerDeletion": True,
        }  # fmt: skip
        body = {"metadata": {"ownerReferences": [reference]}}
        self._call("PATCH", f"/api/v1/namespaces/{namespace}/configmaps/{name}", {}, body)

    def log(
        self, namespace: str, pod: str, container: str, since: str | None, limit: int | None, *, previous: bool = False
    ) -> bytes:
        """Lines of a container's log, each with its time in front; from the second ``since`` on where it is given.

        At most ``limit`` bytes, the last line then being cut; of the start before the newest where ``previous``.
        """
        # The API has no offsets: with the time in front of each line a reader knows where it was.
        query: dict[str, Any] = {"container": container, "timestamps": "true"}
        if limit is not None:
            query["limitBytes"] = limit
        if since is not None:
            query["sinceTime"] = since
        if previous:
            query["previous"] = "true"
        found: bytes = self._call("GET", f"/api/v1/namespaces/{namespace}/pods/{pod}/log", query, raw=True)
        return found

    def read(self, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any] | None:
        """An object, or a list of them, by its path in the API; None where there is none."""
        return self._get(path, query)

    def nodes_and_pods(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """All nodes, and the pods of all namespaces; None in place of those where this user may not see them."""
        nodes = self._call("GET", "/api/v1/nodes")
        try:
            pods = self._call("GET", "/api/v1/pods")
        except Refused as error:
            if error.status != 403:
                raise
            return list(nodes.get("items") or ()), None
        return list(nodes.get("items") or ()), list(pods.get("items") or ())

    def may(self, namespace: str, verb: str, group: str, resource: str) -> bool:
        """Whether this user may do something in a namespace, as the API server itself answers."""
        name, _, part = resource.partition("/")
        asked = {"namespace": namespace, "verb": verb, "group": group, "resource": name, "subresource": part}
        body = {
            "apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }  # fmt: skip
        found = self._call("POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", {}, body)
        return bool((found.get("status") or {}).get("allowed"))

    def resource(self, kind: str) -> tuple[str, str]:
        """Group and plural of a kind."""
        return _LOCATIONS[kind].group, _LOCATIONS[kind].plural

    def exists(self, path: str) -> bool | None:
        """Whether an object is there, by its path in the API; None where this user may not see it."""
        try:
            return self._get(path) is not None
        except Refused as error:
            # Roles may be allowed to create jobs and not to read secrets: that is no proof of absence.
            if error.status == 403:
                return None
            raise

    def has_kind(self, kind: str, namespace: str) -> bool:
        """Whether the cluster knows a custom resource."""
        try:
            # The path of a kind exists only where its CRD is installed.
            self._call("GET", self._objects(kind, namespace), {"limit": 1})
        except Refused as error:
            if error.status == 404:
                return False
            raise
        return True

    def _objects(self, kind: str, namespace: str, name: str = "") -> str:
        row = _LOCATIONS[kind]
        group = f"apis/{row.group}" if row.group else "api"
        return f"/{group}/{row.version}/namespaces/{namespace}/{row.plural}{f'/{name}' if name else ''}"

    def _get(self, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = self._call("GET", path, query)
        except Refused as error:
            if error.status == 404:
                return None
            raise
        return found

    def _delete(self, path: str, query: Mapping[str, Any]) -> None:
        try:
            self._call("DELETE", path, query)
        except Refused as error:
            if error.status not in (404, 409):  # 409: it is being deleted
                raise

    def _call(
        self, method: str, path: str, query: Mapping[str, Any] | None = None, body: Any = None, *, raw: bool = False
    ) -> Any:
        """One request. What changes nothing is tried again; of anything else the caller finds out what has happened."""
        renewed = False
        for left in range(_TRIES - 1, -1, -1):
            try:
                return self._request(method, path, query or {}, body, raw=raw)
            except Refused as error:
                # Tokens of EKS last 15 minutes, and the client does not read every kind of them again.
                if error.status != 401 or renewed:
                    raise
                renewed, self._client = True, None
            except QueryError:
                # These may be carried out twice with the same result; a second POST would be another job, or a refusal.
                if method not in ("GET", "DELETE", "PUT") or not left:
                    raise
                self.sleep(_PAUSE_SECONDS)
        raise AssertionError  # the last try raised or returned

    def _request(self, method: str, path: str, query: Mapping[str, Any], body: Any, *, raw: bool) -> Any:
        if self._client is None:
            self._client = self.connect()
        headers = {"Accept": "application/json, */*"}
        if body is not None:
            kind = "merge-patch+json" if method == "PATCH" else "json"
            headers["Content-Type"] = f"application/{kind}"
        try:
            # The one call below all typed ones: their models reject answers with fields that are newer than the client.
            answer = self._client.call_api(
                path, method, query_params=list(query.items()), header_params=headers, body=body,
                auth_settings=["BearerToken"], _preload_content=False, _request_timeout=TIMEOUT_SECONDS,
                _return_http_data_only=True,
            )  # fmt: skip
            data: bytes = answer.data
        except Exception as error:
            ours = self._in_our_words(f"{method} {path}", error)
            if ours is None:
                raise
            raise ours from error
        return data if raw else json.loads(data)

    def _in_our_words(self, action: str, error: Exception) -> SubmitError | None:
        from_server, from_connection = _errors()
        if isinstance(error, from_server):
            return self._refusal(action, error)
        if isinstance(error, (from_connection, OSError)):
            return QueryError(f"the cluster {self.name} does not answer: {error}")
        return None

    def _refusal(self, action: str, error: Any) -> SubmitError:
        words = _words(error.body) or str(error.reason or "no reason was given")
        if not error.status or error.status in _TRANSIENT:
            return QueryError(f"the cluster {self.name} does not answer: {words}")
        if error.status == 401:
            words = f"{words}. The credentials of this context are not accepted: log in again"
        return Refused(f"the cluster {self.name} refused {action}: {words}", error.status)


def _errors() -> tuple[type[Exception], type[Exception]]:
    """The client's error for an answer of the API server, and that for none."""
    from kubernetes.client.exceptions import ApiException
    from urllib3.exceptions import HTTPError

    return ApiException, HTTPError


def _words(body: Any) -> str:
    """The message of a Status object, which the API server sends with every refusal."""
    try:
        found = json.loads(body)
    except (TypeError, ValueError):
        return ""
    return str(found.get("message", "")) if isinstance(found, dict) else ""


@cache
def cluster(context: str | None) -> KubernetesCluster:
    """The cluster of a context, made once; null stands for the current one, or the one around this process.

    Raises ``SubmitError`` where the client is not installed, or there is no such context.
    """
    _assert_client()
    from kubernetes import config
    from kubernetes.config.config_exception import ConfigException

    try:
        contexts, current = config.list_kube_config_contexts()
    except ConfigException as error:
        if context in (None, IN_CLUSTER):
            return KubernetesCluster(IN_CLUSTER, _inside)
        raise SubmitError(f"backend.context: no kubeconfig can be read ({error}). Make one: {_UPDATE}") from error
    # Checked here, because the client's own error does not list what there is.
    known = [str(it["name"]) for it in contexts]
    name = context if context is not None else str(current["name"])
    if name == IN_CLUSTER and name not in known:
        return KubernetesCluster(IN_CLUSTER, _inside)
    if name not in known:
        listed = ", ".join(known) or "none"
        raise SubmitError(
            f"backend.context: the kubeconfig has no context {name!r}. It has: {listed}. Add it: {_UPDATE}"
        )

    def connect() -> Any:
        try:
            return config.new_client_from_config(context=name)
        except ConfigException as error:
            raise SubmitError(f"backend.context: {name} cannot be used: {error}") from error

    return KubernetesCluster(name, connect)


_UPDATE = "aws eks update-kubeconfig --name CLUSTER"


def _inside() -> Any:
    from kubernetes import client, config
    from kubernetes.config.config_exception import ConfigException

    configuration = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)
    except ConfigException as error:
        raise SubmitError(
            f"backend.context: there is no kubeconfig, and this process is in no pod ({error}). Make one: {_UPDATE}"
        ) from error
    return client.ApiClient(configuration)


def _assert_client() -> None:
    """Raise ``SubmitError`` unless the client is there, in a version that this adapter is made for."""
    if (lacking := missing("kubernetes")) is not None:
        raise SubmitError(lacking)
    found = metadata.version("kubernetes")
    if int(found.partition(".")[0]) not in SUPPORTED:
        first, last = SUPPORTED[0], SUPPORTED[-1]
        raise SubmitError(
            f"kubernetes {found} is installed, and versions {first} to {last} are supported. {command('kubernetes')}"
        )


def dropped_fields(sent: Any, held: Any, path: str = "") -> Sequence[str]:
    """Dotted paths of what was sent and is not in the object that the cluster holds: its CRD does not know them."""
    if isinstance(sent, dict):
        if not isinstance(held, dict):
            return [path]
        found: list[str] = []
        for key, value in sent.items():
            at = f"{path}.{key}" if path else key
            # An empty value may be left out by the server.
            found += dropped_fields(value, held[key], at) if key in held else [at] if value not in ({}, [], "") else []
        return found
    if isinstance(sent, list) and isinstance(held, list):
        return [it for i, value in enumerate(sent) for it in dropped_fields(value, held[i] if i < len(held) else None,
                                                                           f"{path}.{i}")]  # fmt: skip
    return [path] if held is None and sent is not None else []
