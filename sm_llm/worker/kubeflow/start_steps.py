"""Starts the jobs of a workflow's steps, each once those that it reads from have done their work.

``python3 start_steps.py FOLDER ACCOUNT``, in a pod of its own. FOLDER has ``steps.json``, a list of ``{"name",
"after"}`` in order, and per step ``step-NAME.json``, the manifest of its job. ACCOUNT is where Kubernetes mounts the
service account. It runs in the image of the jobs, before any code of ours is there, so it imports nothing of this
package. All that it knows is in the cluster: started again, it continues.
"""

import json
import os
import signal
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

POLL_SECONDS = 3.0
STOPPED = "sm_llm: stopped"
"""How the message begins that a pod leaves whose processes have stopped before their work was done."""
_PLURALS = {"PyTorchJob": "pytorchjobs", "HyperPodPyTorchJob": "hyperpodpytorchjobs"}
_JOB_LABEL, _ATTEMPT, _RUN = "sm-llm/job", "sm-llm/attempt", "sm-llm/run"
_SUCCEEDED, _FAILED = ("Succeeded", "Completed", "Complete"), ("Failed",)
_NO_ANSWER = (429, 500, 502, 503, 504)
WAITING, RUNNING, DONE, ENDED = "waiting", "running", "done", "ended"


class ApiSilent(Exception):
    """Nothing is known, and it may be asked again."""


class Api:
    """The API server of the cluster around this pod."""

    def __init__(self, account: str, environ: dict[str, str]) -> None:
        host, port = environ["KUBERNETES_SERVICE_HOST"], environ["KUBERNETES_SERVICE_PORT"]
        self._base = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        self._account = Path(account)
        context = ssl.create_default_context(cafile=str(self._account / "ca.crt"))
        # Without the proxies of the environment, which are for addresses outside of the cluster.
        handlers = urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        self._opener = urllib.request.build_opener(*handlers)

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
        """Status and object of one request. Raises ``ApiSilent``."""
        data = None if body is None else json.dumps(body).encode()
        # Read each time: Kubernetes renews the token in the file.
        token = (self._account / "token").read_text(encoding="utf-8").strip()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        request = urllib.request.Request(self._base + path, data, headers, method=method)
        try:
            with self._opener.open(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            # Overloaded, or being replaced: a managed control plane restarts while workflows run.
            if error.code in _NO_ANSWER:
                raise ApiSilent(str(error)) from None
            try:
                found = json.loads(error.read())
            except ValueError:
                found = {}
            return error.code, found if isinstance(found, dict) else {}
        except (OSError, ValueError) as error:
            raise ApiSilent(str(error)) from None


class StepJob:
    """One step: its name, those before it, and its job."""

    def __init__(self, row: dict[str, Any], manifest: dict[str, Any]) -> None:
        self.name: str = row["name"]
        self.after: list[str] = row["after"]
        self.manifest = manifest
        self.state = WAITING

    @property
    def _path(self) -> str:
        namespace = self.manifest["metadata"]["namespace"]
        return f"/apis/{self.manifest['apiVersion']}/namespaces/{namespace}/{_PLURALS[self.manifest['kind']]}"

    @property
    def _job(self) -> str:
        return str(self.manifest["metadata"]["name"])

    def start(self, api: Api) -> str:
        """Create the job, once. Ends the process where the cluster refuses it."""
        status, found = api.ask("POST", self._path, self.manifest)
        if status == 409:
            # The answer to an earlier request may have been lost, or this pod was started again.
            _, found = api.ask("GET", f"{self._path}/{self._job}")
            if self._marks(found) != self._marks(self.manifest):
                raise SystemExit(f"sm_llm: step {self.name}: there is another job {self._job}. Delete it")
        elif status >= 300:
            words = found.get("message") or f"status {status}"
            raise SystemExit(f"sm_llm: step {self.name}: the cluster refused its job: {words}")
        return RUNNING

    @staticmethod
    def _marks(job: dict[str, Any]) -> tuple[Any, Any]:
        found = job.get("metadata", {}).get("annotations") or {}
        return found.get(_RUN), found.get(_ATTEMPT)

    def read_state(self, api: Api) -> str:
        """The state of the job, which was started."""
        status, found = api.ask("GET", f"{self._path}/{self._job}")
        # Deleted by hand or by a stop: nothing will finish it, and those behind it never begin.
        if status == 404:
            return ENDED
        if status >= 300:
            raise SystemExit(f"sm_llm: step {self.name}: the cluster shows no job: {found.get('message')}")
        held = [it["type"] for it in found.get("status", {}).get("conditions") or () if it.get("status") == "True"]
        last = held[-1] if held else ""
        if last in _SUCCEEDED:
            return ENDED if self._has_stopped(api) else DONE
        return ENDED if last in _FAILED else RUNNING

    def _has_stopped(self, api: Api) -> bool:
        """Whether its processes stopped in order before their work was done, which the operator takes for success."""
        namespace = self.manifest["metadata"]["namespace"]
        _, found = api.ask(
            "GET", f"/api/v1/namespaces/{namespace}/pods?labelSelector={quote(f'{_JOB_LABEL}={self._job}')}"
        )
        for pod in found.get("items") or ():
            for container in pod.get("status", {}).get("containerStatuses") or ():
                ended = (container.get("state") or {}).get("terminated") or {}
                if str(ended.get("message") or "").startswith(STOPPED):
                    return True
        return False


def advance(steps: list[StepJob], api: Api) -> None:
    """Bring every step's state up to date, and start those that may begin."""
    states = {step.name: step.state for step in steps}
    for step in steps:
        before = [states[it] for it in step.after]
        if step.state == RUNNING:
            step.state = step.read_state(api)
        # What it would read is never written.
        elif step.state == WAITING and ENDED in before:
            step.state = ENDED
        elif step.state == WAITING and all(it == DONE for it in before):
            step.state = step.start(api)
        if step.state != states[step.name]:
            print(f"sm_llm: step {step.name}: {step.state}", flush=True)
        states[step.name] = step.state


def main(folder: str, account: str) -> None:
    """Start all steps; returns once each has ended, or never will begin."""
    # The first process of a container gets no signal that it has no handler for.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    rows = json.loads((Path(folder) / "steps.json").read_text(encoding="utf-8"))
    manifests = (json.loads((Path(folder) / f"step-{row['name']}.json").read_text(encoding="utf-8")) for row in rows)
    steps = [StepJob(row, manifest) for row, manifest in zip(rows, manifests, strict=True)]
    api, reported = Api(account, dict(os.environ)), False
    while any(it.state in (WAITING, RUNNING) for it in steps):
        try:
            advance(steps, api)
            reported = False
        except ApiSilent as error:
            if not reported:
                print(f"sm_llm: the cluster does not answer: {error}; asking again", flush=True)
            reported = True
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
