"""Entry point of convert jobs: everything it needs to know is in job.json."""

from sm_llm.contract.bootstrap import install_missing

install_missing(__file__)

from sm_llm.worker.main import program  # noqa: E402 - it needs what has just been installed

if __name__ == "__main__":  # helper processes that are spawned import this file again
    raise SystemExit(program("convert"))
