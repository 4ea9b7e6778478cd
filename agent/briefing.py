"""History to text: what a proposer that is a language model is shown."""

from __future__ import annotations

from harness.records import History


def brief(history: History) -> str:
    """Return the briefing: deterministic, and nothing in it is finer than the noise."""
    lines = [f"Study {history.study}: {history.task}, budget {history.budget}, metric {history.metric}."]
    for standing in history.lineage:
        score = standing.score
        if score is not None and history.noise is not None:
            lines.append(f"node {standing.node}: {history.noise.rounded(score):g}")
    return "\n".join(lines)
