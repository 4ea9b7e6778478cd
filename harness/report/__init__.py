"""From the ledger to what people read: tables, pictures, one HTML page."""
