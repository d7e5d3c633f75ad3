"""DCP's writer, with what every process reads kept apart from what one process reads."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItemType
from torch.futures import Future

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
    from torch.distributed.checkpoint.storage import WriteResult


class ShardWriter(FileSystemWriter):
    """A process's shards make one file (``__<rank>_0``); whole tensors, such as a step count, another (``…_whole_0``).

    Else every node would fetch the large file of whichever process DCP chose to save a few bytes that all share.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        shards = [item for item in plan.items if item.type is WriteItemType.SHARD]
        whole = [item for item in plan.items if item.type is not WriteItemType.SHARD]
        apart = replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}whole_")
        results: list[WriteResult] = []
        for items, storage in ((shards, plan.storage_data), (whole, apart)):
            if items:
                # DCP writes one file per call and thread under the plan's prefix; two calls with two prefixes make two.
                results += super().write_data(replace(plan, items=items, storage_data=storage), planner).wait()
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written
