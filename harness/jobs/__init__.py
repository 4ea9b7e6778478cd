"""What runs in child processes. A child does not know its parent: no ledger, search, judge or policy in here."""
