-- A trial may go on from a lineage node's checkpoint in the place of the base (policy: start_from = "parent"). The same
-- config from another start is another trial: `start` is part of what is unique, and of what counts for a config. NULL:
-- the base itself, or a fresh model. The lineage may come back to a config that it has left.

ALTER TABLE trials ADD COLUMN start INTEGER REFERENCES lineage (node);

DROP INDEX one_score_per_seed;
DROP INDEX one_score_per_replicate;
DROP VIEW counted_scores;
DROP VIEW leaderboard;
DROP VIEW best_lineage;

CREATE UNIQUE INDEX one_score_per_seed ON trials (config_digest, ifnull(start, -1), seed, budget, epoch)
    WHERE state = 'scored';
CREATE UNIQUE INDEX one_score_per_replicate ON trials (config_digest, ifnull(start, -1), replicate, budget, epoch)
    WHERE state = 'scored' AND role NOT IN ('reference', 'final');

CREATE TRIGGER trials_keep_start BEFORE UPDATE ON trials WHEN NEW.start IS NOT OLD.start
BEGIN SELECT RAISE(ABORT, 'what a trial is never changes, only how it ended'); END;

CREATE TRIGGER trials_start_where_they_may BEFORE INSERT ON trials
WHEN NEW.start IS NOT NULL AND NEW.role IN ('reference', 'baseline', 'canary')
BEGIN SELECT RAISE(ABORT, 'the untouched base and the baseline go on from no other trial'); END;

-- Rebuilt: a config was unique in the lineage, now it is so among the nodes that were made from one start.
CREATE TABLE lineage_rebuilt (
    node INTEGER PRIMARY KEY,
    position INTEGER NOT NULL UNIQUE CHECK (position >= 0),
    parent INTEGER REFERENCES lineage (node),
    proposal INTEGER UNIQUE REFERENCES proposals (number),
    trial INTEGER NOT NULL REFERENCES trials (id),
    diff TEXT NOT NULL CHECK (json_type(diff) = 'object'),
    config TEXT NOT NULL CHECK (json_type(config) = 'object'),
    config_digest TEXT NOT NULL CHECK (length(config_digest) = 64),
    checkpoint_digest TEXT NOT NULL CHECK (length(checkpoint_digest) = 64),
    created TEXT NOT NULL,
    CHECK ((node = 0) = (proposal IS NULL)),
    CHECK ((node = 0) = (parent IS NULL)),
    CHECK ((node = 0) = (position = 0)),
    CHECK (proposal IS NULL OR proposal = node),
    CHECK (parent IS NULL OR parent <> node)
) STRICT;
INSERT INTO lineage_rebuilt SELECT * FROM lineage;
DROP TABLE lineage;
ALTER TABLE lineage_rebuilt RENAME TO lineage;

CREATE TRIGGER lineage_of_kept_proposals BEFORE INSERT ON lineage
WHEN NEW.proposal IS NOT NULL AND (SELECT decision FROM verdicts WHERE proposal = NEW.proposal) IS NOT 'kept'
BEGIN SELECT RAISE(ABORT, 'only kept proposals join the lineage'); END;
CREATE TRIGGER lineage_of_scored_trials BEFORE INSERT ON lineage
WHEN NOT EXISTS (SELECT 1 FROM trials
    WHERE id = NEW.trial AND state = 'scored' AND config_digest = NEW.config_digest AND proposal IS NEW.proposal)
BEGIN SELECT RAISE(ABORT, 'a lineage node stands on a scored trial of its own config'); END;
CREATE TRIGGER lineage_of_the_search BEFORE INSERT ON lineage
WHEN (SELECT role FROM trials WHERE id = NEW.trial) IN ('reference', 'final')
BEGIN SELECT RAISE(ABORT, 'a lineage node stands on a trial of the search'); END;
CREATE TRIGGER lineage_from_its_parent BEFORE INSERT ON lineage
WHEN (SELECT start FROM trials WHERE id = NEW.trial) IS NOT NULL
    AND (SELECT start FROM trials WHERE id = NEW.trial) IS NOT NEW.parent
BEGIN SELECT RAISE(ABORT, 'a lineage node stands on a trial that started from its parent'); END;
CREATE TRIGGER lineage_has_a_config_once BEFORE INSERT ON lineage
WHEN EXISTS (SELECT 1 FROM lineage l JOIN trials t ON t.id = l.trial
    WHERE l.config_digest = NEW.config_digest AND t.start IS (SELECT start FROM trials WHERE id = NEW.trial))
BEGIN SELECT RAISE(ABORT, 'the lineage has that config from that start already'); END;
CREATE TRIGGER lineage_fixed BEFORE UPDATE ON lineage BEGIN SELECT RAISE(ABORT, 'the lineage never changes'); END;
CREATE TRIGGER lineage_stays BEFORE DELETE ON lineage BEGIN SELECT RAISE(ABORT, 'the lineage never shrinks'); END;

-- A node's config that goes on from the node's own checkpoint was selected by nothing: its replicate 0 counts.
CREATE VIEW counted_scores AS
SELECT config_digest, start, replicate, score, accuracy, guard_score, id AS trial, proposal
FROM trials
WHERE state = 'scored'
    AND role NOT IN ('reference', 'final')
    AND budget = (SELECT budget FROM study)
    AND epoch = (SELECT max(epoch) FROM trials)
    AND (proposal IS NULL OR replicate > 0 OR start IS proposal);

-- Scores from one start can be compared; those of a later start have had more training.
CREATE VIEW leaderboard AS
WITH confirmed AS (
    SELECT config_digest, start, avg(score) AS score, count(*) AS replicates FROM counted_scores
    GROUP BY config_digest, start
), screened AS (
    SELECT config_digest, start, min(score) AS score
    FROM trials
    WHERE state = 'scored' AND replicate = 0 AND role NOT IN ('reference', 'final')
        AND budget = (SELECT budget FROM study) AND epoch = (SELECT max(epoch) FROM trials)
    GROUP BY config_digest, start
), configs AS (
    SELECT config_digest, start, min(proposal) AS proposal FROM trials WHERE state = 'scored' AND role <> 'final'
    GROUP BY config_digest, start
)
SELECT coalesce('proposal ' || c.proposal, 'baseline') || iif(c.start = ifnull(c.proposal, 0), ', continued', '')
        AS config,
    coalesce(confirmed.score, screened.score) AS score,
    coalesce(confirmed.replicates, 0) AS replicates,
    iif(confirmed.score IS NULL, 'one screening run', 'mean of replicates') AS basis,
    coalesce(v.decision, p.state, 'baseline') AS outcome,
    p.diff,
    p.source,
    screened.score AS screening_score,
    c.config_digest,
    c.start
FROM configs c
    LEFT JOIN confirmed ON confirmed.config_digest = c.config_digest AND confirmed.start IS c.start
    LEFT JOIN screened ON screened.config_digest = c.config_digest AND screened.start IS c.start
    LEFT JOIN proposals p ON p.number = c.proposal
    LEFT JOIN verdicts v ON v.proposal = c.proposal
WHERE coalesce(confirmed.score, screened.score) IS NOT NULL
ORDER BY score;

CREATE VIEW best_lineage AS
WITH RECURSIVE chain (node, back) AS (
    SELECT node, 0 FROM lineage WHERE position = (SELECT max(position) FROM lineage)
    UNION ALL
    SELECT l.parent, chain.back + 1 FROM chain JOIN lineage l ON l.node = chain.node WHERE l.parent IS NOT NULL
)
SELECT row_number() OVER (ORDER BY chain.back DESC) - 1 AS step,
    l.node,
    iif(l.node = 0, 'baseline', 'proposal ' || l.node) AS config,
    l.diff,
    (SELECT avg(s.score) FROM counted_scores s WHERE s.config_digest = l.config_digest AND s.start IS t.start) AS score,
    (SELECT count(*) FROM counted_scores s WHERE s.config_digest = l.config_digest AND s.start IS t.start)
        AS replicates,
    v.difference,
    v.standard_error,
    p.rationale,
    v.reason,
    l.trial,
    l.checkpoint_digest,
    t.start
FROM chain
    JOIN lineage l ON l.node = chain.node
    JOIN trials t ON t.id = l.trial
    LEFT JOIN proposals p ON p.number = l.proposal
    LEFT JOIN verdicts v ON v.proposal = l.proposal
ORDER BY step;
