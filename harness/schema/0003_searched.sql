-- What a replay runs (role final: reproductions, full runs under another budget, configs with a step of the lineage taken
-- out) belongs to a proposal without being a result of its search.

DROP VIEW ledger;
DROP VIEW leaderboard;

CREATE VIEW ledger AS
SELECT p.number AS proposal,
    p.parent,
    p.source,
    p.diff,
    coalesce(v.decision, p.state) AS outcome,
    v.difference,
    v.standard_error,
    v.probability,
    v.replicates,
    coalesce(v.reason, p.reason) AS reason,
    (SELECT t.score FROM trials t WHERE t.proposal = p.number AND t.replicate = 0 AND t.state = 'scored'
        ORDER BY t.id LIMIT 1) AS screening_score,
    (SELECT count(*) FROM trials t WHERE t.proposal = p.number AND t.role <> 'final') AS trials,
    (SELECT group_concat(DISTINCT t.state) FROM trials t WHERE t.proposal = p.number AND t.role <> 'final'
        AND t.state NOT IN ('running', 'scored')) AS failures,
    (SELECT round(sum(t.train_seconds), 1) FROM trials t WHERE t.proposal = p.number AND t.role <> 'final')
        AS train_seconds,
    p.rationale,
    p.watch,
    p.model,
    p.predicted_change,
    p.confidence,
    p.state,
    v.decision,
    p.created
FROM proposals p LEFT JOIN verdicts v ON v.proposal = p.number
ORDER BY p.number;

CREATE VIEW leaderboard AS
WITH confirmed AS (
    SELECT config_digest, avg(score) AS score, count(*) AS replicates FROM counted_scores GROUP BY config_digest
), screened AS (
    SELECT config_digest, min(score) AS score
    FROM trials
    WHERE state = 'scored' AND replicate = 0 AND role NOT IN ('reference', 'final')
        AND budget = (SELECT budget FROM study) AND epoch = (SELECT max(epoch) FROM trials)
    GROUP BY config_digest
), configs AS (
    SELECT config_digest, min(proposal) AS proposal FROM trials WHERE state = 'scored' AND role <> 'final'
    GROUP BY config_digest
)
SELECT coalesce('proposal ' || c.proposal, 'baseline') AS config,
    coalesce(confirmed.score, screened.score) AS score,
    coalesce(confirmed.replicates, 0) AS replicates,
    iif(confirmed.score IS NULL, 'one screening run', 'mean of replicates') AS basis,
    coalesce(v.decision, p.state, 'baseline') AS outcome,
    p.diff,
    p.source,
    screened.score AS screening_score,
    c.config_digest
FROM configs c
    LEFT JOIN confirmed USING (config_digest)
    LEFT JOIN screened USING (config_digest)
    LEFT JOIN proposals p ON p.number = c.proposal
    LEFT JOIN verdicts v ON v.proposal = c.proposal
WHERE coalesce(confirmed.score, screened.score) IS NOT NULL
ORDER BY score;
