"""Entry point of script jobs: everything it needs to know is in job.json."""

from sm_llm.worker.main import program

if __name__ == "__main__":  # helper processes that are spawned import this file again
    raise SystemExit(program("script"))
