"""Runs torchrun so that its key-value store listens on this machine's loopback interface, not on all of them.

``python -P -m sm_llm.worker.loopback torch.distributed.run ARGUMENTS``, or with this file's path. It imports nothing of
this package, so that SageMaker's toolkit can start it where the package is not on the path.
"""

from __future__ import annotations

import runpy
import socket
import sys
from typing import TYPE_CHECKING

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous as static

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters


class LoopbackRendezvous(static.StaticTCPRendezvous):
    """torch's static rendezvous; its own store would listen on all interfaces, whatever its address."""

    def next_rendezvous(self) -> RendezvousInfo:
        # torch makes the store itself only where there is none.
        if self._store is None and self.rank == 0:
            with socket.socket() as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a launcher keeps the port reserved
                listener.bind((self.master_addr, self.master_port))
                listener.listen()
                self._store = TCPStore(
                    self.master_addr, self.master_port, self.world_size, is_master=True, timeout=self.timeout,
                    multi_tenant=True, master_listen_fd=listener.detach(),
                )  # fmt: skip
        return super().next_rendezvous()


def main() -> None:
    """Run the module that the first argument names, with the others."""
    create = static.create_rdzv_handler

    def create_loopback(params: RendezvousParameters) -> RendezvousHandler:
        it = create(params)
        assert isinstance(it, static.StaticTCPRendezvous)
        # The constructor takes seconds where the attribute is a duration.
        seconds = int(it.timeout.total_seconds())
        return LoopbackRendezvous(it.master_addr, it.master_port, it.rank, it.world_size, it.run_id, seconds)

    # torchrun looks the function up in this module when it starts.
    static.create_rdzv_handler = create_loopback
    # From here on the command line is torchrun's own.
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
