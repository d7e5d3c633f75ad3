"""The one adapter of the official Kubernetes client: objects as plain dictionaries, errors in our words.

Only here is the package ``kubernetes`` imported, inside of functions, since it takes more than a second.
"""

from __future__ import annotations

import json
import logging
import os
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal

from sm_llm.errors import QueryError, SubmitError
from sm_llm.launcher.backends.kubeflow.manifest import KINDS, Kind
from sm_llm.launcher.backends.kubeflow.names import IN_CLUSTER, JOB_LABEL, RUN_ANNOTATION
from sm_llm.optional import command, missing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

SUPPORTED = range(35, 36)
"""Major versions of the client that this adapter is made for; ``setup.cfg`` pins the same."""
TIMEOUT_SECONDS = (10.0, 60.0)
"""To connect, and between two parts of an answer."""
_TRIES, _PAUSE_SECONDS = 4, 1.0
DELETE_SECONDS, _POLL_SECONDS = 300.0, 0.5
# Too many requests, and faults of the API server or a proxy before it: nothing is known of the request.
_TRANSIENT = (429, 500, 502, 503, 504)
# Of an answer that is none, in its error.
_SHOWN_BYTES = 60
_LOCATIONS = {
    **KINDS,
    "Job": Kind("batch", "v1", "jobs"),
    "Pod": Kind("", "v1", "pods"),
    "Role": Kind("rbac.authorization.k8s.io", "v1", "roles"),
    "RoleBinding": Kind("rbac.authorization.k8s.io", "v1", "rolebindings"),
    "ServiceAccount": Kind("", "v1", "serviceaccounts"),
}
# Objects of a list in one answer, as kubectl asks for them: all pods of a large cluster would be hundreds of MiB.
_PAGE_ITEMS = 500
_CHUNK_BYTES, _CONNECTIONS = 1 << 16, 16

Form = Literal["any", "object", "list"]
"""What an answer has to be: one object, a list of them, or one of those that have no name."""


class Refused(SubmitError):
    """The API server's answer: it did nothing. ``status`` is that of HTTP."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass
class PodLog:
    """An answer that holds a log, read as it comes."""

    cluster: str
    answer: Any

    def __iter__(self) -> Iterator[bytes]:
        """Raises ``QueryError`` where the answer breaks off."""
        _, from_connection = _errors()
        try:
            yield from self.answer.stream(_CHUNK_BYTES, decode_content=False)
        except (from_connection, OSError, ValueError) as error:
            raise QueryError(f"the cluster {self.cluster} does not answer: a log broke off: {error}") from error
        finally:
            self.answer.close()

    def close(self) -> None:
        """End the answer for a thread that waits for more of it."""
        with suppress(OSError, ValueError, RuntimeError):  # it has ended already
            self.answer.shutdown()


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
        return self._get(self.path(kind, namespace, name), form="object")

    def pods(self, namespace: str, job: str) -> list[dict[str, Any]]:
        """The pods of a job, those of an earlier attempt that are still ending included."""
        # By our own label: the operators' labels differ, and changed between releases.
        return self.items(f"/api/v1/namespaces/{namespace}/pods", {"labelSelector": f"{JOB_LABEL}={job}"})

    def events(self, held: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What the cluster's controllers report of an object, oldest first; nothing where this user may not see it."""
        namespace, uid = held["metadata"]["namespace"], held["metadata"]["uid"]
        # All attempts have one name, and so do pods that follow one another; events are kept for an hour.
        fields = {"fieldSelector": f"involvedObject.uid={uid}"}
        try:
            found = self.items(f"/api/v1/namespaces/{namespace}/events", fields)
        except Refused as error:
            # They only explain a state, which is known without them.
            if error.status != 403:
                raise
            return []
        return sorted(found, key=_time_of)

    def create(self, manifest: Mapping[str, Any], *, dry_run: bool = False) -> dict[str, Any]:
        """Create an object; returns it as the cluster holds it. Raises ``Refused``."""
        path = self.path(str(manifest["kind"]), str(manifest["metadata"]["namespace"]))
        found: dict[str, Any] = self._call("POST", path, {"dryRun": "All"} if dry_run else {}, manifest, form="object")
        return found

    def delete_job(self, kind: str, namespace: str, name: str) -> None:
        """Delete a job with its pods; returns at once. One that is gone is left alone."""
        # The job is kept until what it owns is gone, so that its end is the end of its pods.
        self._delete(self.path(kind, namespace, name), {"propagationPolicy": "Foreground"})

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
        """Create a ConfigMap, or replace one of the same run. Raises ``Refused`` for one of another."""
        body = manifest["metadata"]
        path = f"/api/v1/namespaces/{body['namespace']}/configmaps"
        try:
            self._call("POST", path, {}, manifest)
        except Refused as error:
            # 409: it is there from a try of this attempt that was broken off.
            if error.status != 409:
                raise
            held = self._get(f"{path}/{body['name']}") or {}
            ours, found = (_run_of(it) for it in (manifest, held))
            if found != ours:
                words = f"{body['namespace']} has a ConfigMap {body['name']} that is not of {ours}. Delete it"
                raise Refused(words, 409) from error
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
        self, namespace: str, pod: str, container: str, since: str | None, *, previous: bool = False,
        follow: bool = False,
    ) -> PodLog:  # fmt: skip
        """Lines of a container's log, each with its time in front; from the second ``since`` on where it is given.

        Of the start before the newest where ``previous``; where ``follow`` the answer lasts as long as the container.
        """
        # The API has no offsets: with the time in front of each line a reader knows where it was.
        query: dict[str, Any] = {"container": container, "timestamps": "true"}
        if since is not None:
            query["sinceTime"] = since
        query |= {name: "true" for name, is_on in (("previous", previous), ("follow", follow)) if is_on}
        answer = self._call("GET", f"/api/v1/namespaces/{namespace}/pods/{pod}/log", query, raw=True)
        return PodLog(self.name, answer)

    def read(self, path: str) -> dict[str, Any] | None:
        """An object by its path in the API; None where there is none."""
        return self._get(path)

    def nodes_and_pods(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
        """All nodes, and the pods of all namespaces; None in place of those where this user may not see them."""
        nodes = self.items("/api/v1/nodes")
        try:
            return nodes, self.items("/api/v1/pods")
        except Refused as error:
            if error.status != 403:
                raise
            return nodes, None

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

    def exists(self, path: str, query: Mapping[str, str] | None = None) -> bool | None:
        """Whether an object is there, by its path in the API; None where this user may not see it."""
        try:
            return self._get(path, query) is not None
        except Refused as error:
            # Roles may be allowed to create jobs and not to read secrets: that is no proof of absence.
            if error.status == 403:
                return None
            raise

    def has_kind(self, kind: str, namespace: str) -> bool:
        """Whether the cluster knows a custom resource; True where this user may not list it."""
        # The path of a kind exists only where its CRD is installed. Roles may create jobs without listing them.
        return self.exists(self.path(kind, namespace), {"limit": "1"}) is not False

    def path(self, kind: str, namespace: str, name: str = "") -> str:
        """Of an object in the API, or of all of its kind."""
        row = _LOCATIONS[kind]
        group = f"apis/{row.group}" if row.group else "api"
        return f"/{group}/{row.version}/namespaces/{namespace}/{row.plural}{f'/{name}' if name else ''}"

    def items(self, path: str, query: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        """All objects of a list, which comes in pages."""
        found: list[dict[str, Any]] = []
        part = {**(query or {}), "limit": str(_PAGE_ITEMS)}
        while True:
            try:
                page = self._call("GET", path, part, form="list")
            except Refused as error:
                if error.status != 410 or "continue" not in part:
                    raise
                # The pages are of one state of the cluster, which it forgets after some minutes. In one answer it
                # cannot be forgotten in between.
                return list(self._call("GET", path, query, form="list")["items"] or ())
            found += page["items"] or ()
            token = (page.get("metadata") or {}).get("continue")
            if not token:
                return found
            part["continue"] = str(token)

    def _get(self, path: str, query: Mapping[str, str] | None = None, form: Form = "any") -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = self._call("GET", path, query, form=form)
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
        self, method: str, path: str, query: Mapping[str, Any] | None = None, body: Any = None, *, raw: bool = False,
        form: Form = "any",
    ) -> Any:  # fmt: skip
        """One request. What changes nothing is tried again; of anything else the caller finds out what has happened."""
        renewed = False
        for left in range(_TRIES - 1, -1, -1):
            try:
                found = self._request(method, path, query or {}, body, raw=raw)
                return found if raw else self._parsed(f"{method} {path}", found, form)
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

    def _parsed(self, action: str, data: bytes, form: Form) -> dict[str, Any]:
        """The object in an answer. Raises ``QueryError`` for what no API server sends: it is somebody else's."""
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            found = None
        if not _has_form(found, form):
            begin = data[:_SHOWN_BYTES].decode("utf-8", "replace")
            shown = f"begins with {begin!r}" if data else "is empty"
            raise QueryError(
                f"the cluster {self.name} does not answer: the answer to {action} is no object of Kubernetes and "
                f"{shown}. If a proxy sent it, exclude the cluster's address in NO_PROXY"
            )
        answer: dict[str, Any] = found
        return answer

    def _request(self, method: str, path: str, query: Mapping[str, Any], body: Any, *, raw: bool) -> Any:
        """What an answer holds; the answer itself, which is still to be read, where ``raw``."""
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
            return answer if raw else answer.data
        except Exception as error:
            ours = self._in_our_words(f"{method} {path}", error)
            if ours is None:
                raise
            raise ours from error

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


def _time_of(event: Mapping[str, Any]) -> str:
    """When an event came, the last time of several."""
    # The scheduler and other newer controllers leave lastTimestamp out.
    series = event.get("series") or {}
    times = (series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime"))
    return next((str(it).removesuffix("Z") for it in times if it), "")


def _run_of(held: Mapping[str, Any]) -> str | None:
    found = ((held.get("metadata") or {}).get("annotations") or {}).get(RUN_ANNOTATION)
    return None if found is None else str(found)


def _has_form(found: Any, form: Form) -> bool:
    """Whether an answer is what was asked for, as far down as every object of Kubernetes is the same."""
    if not isinstance(found, dict) or (form == "list" and "items" not in found):
        return False
    if form == "list" and not isinstance(found.get("metadata") or {}, dict):
        return False
    items = found.get("items") or ()
    if not isinstance(items, (list, tuple)) or not all(_is_object(it) for it in items):
        return False
    return _is_object(found) if form == "object" else True


def _is_object(found: Any) -> bool:
    if not isinstance(found, dict):
        return False
    metadata = found.get("metadata")
    if not isinstance(metadata, dict):
        return False
    parts = (found.get("spec"), found.get("status"), metadata.get("annotations"), metadata.get("labels"))
    return isinstance(metadata.get("name"), str) and all(it is None or isinstance(it, dict) for it in parts)


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
        if context == IN_CLUSTER or (context is None and _SERVICE in os.environ):
            return KubernetesCluster(IN_CLUSTER, _inside)
        if context is None:
            raise SubmitError(
                f"backend.context: is not set, and there is no current context ({error}). Name one, or make one: "
                f"{_UPDATE}"
            ) from error
        # A kubeconfig without a current context has the one that is named all the same.
        return KubernetesCluster(context, partial(_connect, context))
    except Exception as error:
        # The client does not check the form of the file: this is whatever its parser raises.
        words = " ".join(str(error).split())
        raise SubmitError(f"backend.context: the kubeconfig cannot be read: {words}. Make one: {_UPDATE}") from error
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
    return KubernetesCluster(name, partial(_connect, name))


def _connect(name: str) -> Any:
    """A client for a context, with fresh credentials. Raises ``SubmitError``."""
    from kubernetes import client, config
    from kubernetes.config.config_exception import ConfigException

    configuration = client.Configuration()
    # By default five for each processor here; logs that are followed hold one each.
    configuration.connection_pool_maxsize = _CONNECTIONS
    with _logged_errors() as found:
        try:
            made = config.new_client_from_config(context=name, client_configuration=configuration)
        except ConfigException as error:
            raise SubmitError(f"backend.context: {name} cannot be used: {error}. Make it anew: {_UPDATE}") from error
    # The client only logs that the command for a token has failed, and asks the cluster as nobody.
    if found and not configuration.api_key and not configuration.cert_file:
        raise SubmitError(f"backend.context: {name} has no credentials: {'; '.join(found)}. Log in again")
    return made


@contextmanager
def _logged_errors() -> Iterator[list[str]]:
    """The messages that are logged as errors in between, which then go nowhere else."""
    found: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield found
    finally:
        root.removeHandler(handler)


# What every pod has of its cluster.
_SERVICE = "KUBERNETES_SERVICE_HOST"
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
