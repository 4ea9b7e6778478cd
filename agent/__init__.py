"""Makes proposals. Imports only ``harness.records`` and ``harness.config``; found through entry points."""
