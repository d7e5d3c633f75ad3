"""Where this very package lies, for child processes that must import it, for bundles and for digests."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
PACKAGE_PARENT = PACKAGE.parent
"""What has to be on ``sys.path`` for this package to be importable."""
