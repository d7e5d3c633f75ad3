"""Where a job runs: one module with one options class per backend, and the table of them."""
