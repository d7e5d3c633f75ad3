"""``python -m sm_llm.cli`` is ``sm-llm``."""

from __future__ import annotations

from sm_llm.cli import main

if __name__ == "__main__":
    main()
