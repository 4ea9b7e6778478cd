"""Sealed: data, loader, timer and evaluation. Nothing here changes during a study, and nothing here imports ours."""
