"""The fetch task: a model or data set of the hub becomes the run's result, file after file, by one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sm_llm.spec.tasks import FetchTask
from sm_llm.storage.hub.hub_addresses import parse_hub
from sm_llm.storage.hub.hub_fetch import StoreTarget, bring_files, select
from sm_llm.storage.hub.hub_ledger import Ledger, ledger_prefix
from sm_llm.storage.publication import publish as publication
from sm_llm.storage.publication.manifest import PartManifest, Save
from sm_llm.storage.syncing.selection import Selection
from sm_llm.storage.uri import open_store
from sm_llm.terminal import counted
from sm_llm.worker.checkpoint.earlier import begins_alone
from sm_llm.worker.inputs.hub_source import FetchReporter, report_source
from sm_llm.worker.publishing.publish_final import announce, settled

if TYPE_CHECKING:
    from sm_llm.spec.job import JobSpec
    from sm_llm.storage.base import Store
    from sm_llm.storage.hub.hub_addresses import HubFile, HubSnapshot
    from sm_llm.worker.context import WorkerContext


def run(context: WorkerContext, job: JobSpec) -> None:
    """Fetch ``job.task`` and publish the files. One process works; the others have nothing to do.

    The commit, and the place that files are stored at, are pinned in the run's storage: another attempt continues with
    the files that are stored already.
    """
    task = job.task
    assert isinstance(task, FetchTask)
    if not begins_alone(context):
        return
    store = open_store(context.job.run_uri, job.storage_options.model_dump())
    ledger = Ledger(store, ledger_prefix(task.source))
    # A branch of the hub may move between two attempts: all of them fetch the commit that the first one saw.
    snapshot = ledger.pin(parse_hub(task.source))
    files, left_out = select(snapshot, Selection(task.include, task.exclude, task.one_weight_format))
    report_source(context, snapshot, files)
    for it in left_out:
        context.log(f"left out ({it.reason}): {counted(it.files, 'file')}, {it.size / 2**20:,.1f} MiB")
    own = publication.new_save(context.job.run_id, None, world_size=context.process.world_size, node_count=1)
    # Of attempts that race, all get the id that was stored first, and so store files in one place.
    save = Save.model_validate_json(ledger.once("save.json", own.model_dump_json()))
    sink = StoreTarget(store, save.data_prefix, ledger, context.scratch / "fetch")
    bring_files(snapshot, files, sink, FetchReporter(context, "fetch", task.source))
    _publish(context, store, PartManifest(save=save, node=0, files=sink.entries(files)), snapshot, files)


def _publish(
    context: WorkerContext, store: Store, part: PartManifest, snapshot: HubSnapshot, files: list[HubFile]
) -> None:
    save = part.save
    publication.write_part(store, part)
    meta = {
        "kind": "hub",
        "source": snapshot.address.uri,
        "commit": snapshot.commit,
        "checksums": {file.path: file.checksum for file in files},
        "spec_digest": context.job.spec_digest,
    }
    # Files are stored one by one, never on this node's disk as a whole: so the parts of ``publish_final`` are called
    # here one after the other.
    published = publication.commit(store, save, meta)
    announce(context, store, settled(context, store, published, {save.save_id}))
