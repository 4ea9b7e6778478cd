"""Migrations of the ledger: numbered SQL files, applied in order, never edited once released."""
