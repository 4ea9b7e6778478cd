"""Owns the loop: policy, ledger, jobs, judge. Imports ``frozen``; torch only below ``harness.jobs``."""
