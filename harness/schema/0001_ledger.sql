-- The ledger of one study. Times are UTC text, durations seconds, JSON is text. Lower scores are better;
-- a difference is candidate minus incumbent, so negative is better. A failed trial has no score: NULL and a reason.

CREATE TABLE migrations (
    number INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    applied TEXT NOT NULL
) STRICT;

-- What the study asks, written once by `overnight init`.
CREATE TABLE study (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    name TEXT NOT NULL,
    task TEXT NOT NULL,
    model TEXT NOT NULL,
    metric TEXT NOT NULL,
    seed INTEGER NOT NULL CHECK (seed >= 0),
    budget TEXT NOT NULL,
    seal TEXT NOT NULL,
    policy TEXT NOT NULL,
    versions TEXT NOT NULL CHECK (json_valid(versions)),
    git_commit TEXT,
    git_dirty INTEGER CHECK (git_dirty IN (0, 1)),
    device TEXT,
    created TEXT NOT NULL,
    CHECK ((git_commit IS NULL) = (git_dirty IS NULL))
) STRICT;

-- What was proposed, whether or not it ever ran. `requested_parent` is what the proposer asked for, `parent` and
-- `config` what it became when it started; a repair may amend `config` while it runs.
CREATE TABLE proposals (
    number INTEGER PRIMARY KEY CHECK (number >= 1),
    source TEXT NOT NULL,
    model TEXT,
    diff TEXT NOT NULL CHECK (json_type(diff) = 'object'),
    rationale TEXT NOT NULL,
    watch TEXT NOT NULL,
    requested_parent INTEGER,
    predicted_change REAL CHECK (abs(predicted_change) < 1e300),
    confidence REAL CHECK (confidence BETWEEN 0 AND 1),
    tokens INTEGER CHECK (tokens >= 0),
    cost_usd REAL CHECK (cost_usd >= 0 AND cost_usd < 1e300),
    latency_seconds REAL CHECK (latency_seconds >= 0 AND latency_seconds < 1e300),
    state TEXT NOT NULL CHECK (state IN ('queued', 'refused', 'duplicate', 'stale', 'running', 'decided')),
    reason TEXT,
    parent INTEGER REFERENCES lineage (node),
    config TEXT CHECK (json_type(config) = 'object'),
    config_digest TEXT CHECK (length(config_digest) = 64),
    created TEXT NOT NULL,
    started TEXT,
    ended TEXT,
    CHECK ((state IN ('running', 'decided')) = (config IS NOT NULL)),
    CHECK ((config IS NULL) = (config_digest IS NULL)),
    CHECK ((config IS NULL) = (parent IS NULL)),
    CHECK ((config IS NULL) = (started IS NULL)),
    CHECK ((state IN ('refused', 'duplicate', 'stale')) = (reason IS NOT NULL)),
    CHECK ((state IN ('queued', 'running')) = (ended IS NULL))
) STRICT;

CREATE INDEX proposals_by_state ON proposals (state);

-- One training job: one config, one seed, one budget. `proposal` owns the config; NULL is the baseline.
CREATE TABLE trials (
    id INTEGER PRIMARY KEY CHECK (id >= 1),
    proposal INTEGER REFERENCES proposals (number),
    role TEXT NOT NULL CHECK (role IN
        ('reference', 'baseline', 'screen', 'replicate', 'control', 'canary', 'repair', 'final')),
    state TEXT NOT NULL CHECK (state IN
        ('running', 'scored', 'stopped', 'out_of_memory', 'diverged', 'crashed', 'timed_out', 'interrupted', 'lost',
         'invalid')),
    epoch INTEGER NOT NULL CHECK (epoch >= 0),
    config TEXT NOT NULL CHECK (json_type(config) = 'object'),
    config_digest TEXT NOT NULL CHECK (length(config_digest) = 64),
    seed INTEGER NOT NULL CHECK (seed >= 0),
    replicate INTEGER NOT NULL CHECK (replicate >= 0),
    budget TEXT NOT NULL,
    seal TEXT NOT NULL,
    device TEXT NOT NULL,
    sandbox TEXT NOT NULL,
    score REAL CHECK (score >= 0 AND score < 1e300),
    perplexity REAL CHECK (perplexity >= 0 AND perplexity < 1e300),
    nats REAL CHECK (nats >= 0 AND nats < 1e300),
    scored_bytes INTEGER CHECK (scored_bytes > 0),
    scored_tokens INTEGER CHECK (scored_tokens > 0),
    steps INTEGER CHECK (steps >= 0),
    tokens INTEGER CHECK (tokens >= 0),
    parameters INTEGER CHECK (parameters >= 0),
    train_seconds REAL CHECK (train_seconds >= 0 AND train_seconds < 1e300),
    warmup_seconds REAL CHECK (warmup_seconds >= 0 AND warmup_seconds < 1e300),
    score_seconds REAL CHECK (score_seconds >= 0 AND score_seconds < 1e300),
    wall_seconds REAL CHECK (wall_seconds >= 0 AND wall_seconds < 1e300),
    tokens_per_second REAL GENERATED ALWAYS AS (CASE WHEN train_seconds > 0 THEN tokens / train_seconds END) VIRTUAL,
    peak_memory_bytes INTEGER CHECK (peak_memory_bytes >= 0),
    device_celsius REAL CHECK (abs(device_celsius) < 1e300),
    device_watts REAL CHECK (device_watts >= 0 AND device_watts < 1e300),
    error_class TEXT,
    error_text TEXT,
    checkpoint_digest TEXT CHECK (length(checkpoint_digest) = 64),
    started TEXT NOT NULL,
    ended TEXT,
    CHECK ((state = 'scored') = (score IS NOT NULL)),
    CHECK ((score IS NULL) = (nats IS NULL) AND (score IS NULL) = (scored_bytes IS NULL)
        AND (score IS NULL) = (scored_tokens IS NULL)),
    CHECK (perplexity IS NULL OR score IS NOT NULL),
    CHECK (checkpoint_digest IS NULL OR score IS NOT NULL),
    CHECK ((state = 'running') = (ended IS NULL)),
    CHECK ((state IN ('running', 'scored')) = (error_class IS NULL)),
    CHECK ((error_class IS NULL) = (error_text IS NULL))
) STRICT;

CREATE INDEX trials_by_proposal ON trials (proposal);
-- The same config, seed and budget on the same machine has one result; so has every replicate number of the search.
CREATE UNIQUE INDEX one_score_per_seed ON trials (config_digest, seed, budget, epoch) WHERE state = 'scored';
CREATE UNIQUE INDEX one_score_per_replicate ON trials (config_digest, replicate, budget, epoch)
    WHERE state = 'scored' AND role NOT IN ('reference', 'final');

CREATE TABLE curves (
    trial INTEGER NOT NULL REFERENCES trials (id),
    point INTEGER NOT NULL CHECK (point >= 0),
    progress REAL NOT NULL CHECK (progress >= 0 AND progress < 1e300),
    seconds REAL NOT NULL CHECK (seconds >= 0 AND seconds < 1e300),
    step INTEGER NOT NULL CHECK (step >= 0),
    train_loss REAL CHECK (abs(train_loss) < 1e300),
    probe_bits_per_byte REAL CHECK (abs(probe_bits_per_byte) < 1e300),
    learning_rate REAL CHECK (abs(learning_rate) < 1e300),
    gradient_norm REAL CHECK (abs(gradient_norm) < 1e300),
    PRIMARY KEY (trial, point)
) STRICT, WITHOUT ROWID;

-- Nats of every val document in the order of the split, for paired comparison: little-endian float64.
CREATE TABLE document_nats (
    trial INTEGER PRIMARY KEY REFERENCES trials (id),
    nats BLOB NOT NULL CHECK (length(nats) % 8 = 0 AND length(nats) > 0)
) STRICT;

-- What the judge decided. `against` is the lineage node that was the incumbent then.
CREATE TABLE verdicts (
    proposal INTEGER PRIMARY KEY REFERENCES proposals (number),
    decision TEXT NOT NULL CHECK (decision IN ('kept', 'discarded', 'inconclusive')),
    difference REAL CHECK (abs(difference) < 1e300),
    standard_error REAL CHECK (standard_error >= 0 AND standard_error < 1e300),
    probability REAL CHECK (probability BETWEEN 0 AND 1),
    replicates INTEGER NOT NULL CHECK (replicates >= 0),
    reason TEXT NOT NULL CHECK (reason <> ''),
    against INTEGER NOT NULL REFERENCES lineage (node),
    decided TEXT NOT NULL,
    CHECK (decision <> 'kept' OR (difference IS NOT NULL AND difference < 0 AND standard_error IS NOT NULL
        AND probability IS NOT NULL AND replicates >= 1))
) STRICT;

-- Kept proposals as a tree from the baseline (node 0); `position` is the order in which they were kept, and the last
-- one is the incumbent. `diff` is against the parent, repairs included.
CREATE TABLE lineage (
    node INTEGER PRIMARY KEY,
    position INTEGER NOT NULL UNIQUE CHECK (position >= 0),
    parent INTEGER REFERENCES lineage (node),
    proposal INTEGER UNIQUE REFERENCES proposals (number),
    trial INTEGER NOT NULL REFERENCES trials (id),
    diff TEXT NOT NULL CHECK (json_type(diff) = 'object'),
    config TEXT NOT NULL CHECK (json_type(config) = 'object'),
    config_digest TEXT NOT NULL UNIQUE CHECK (length(config_digest) = 64),
    checkpoint_digest TEXT NOT NULL CHECK (length(checkpoint_digest) = 64),
    created TEXT NOT NULL,
    CHECK ((node = 0) = (proposal IS NULL)),
    CHECK ((node = 0) = (parent IS NULL)),
    CHECK ((node = 0) = (position = 0)),
    CHECK (proposal IS NULL OR proposal = node),
    CHECK (parent IS NULL OR parent <> node)
) STRICT;

CREATE TABLE insights (
    id INTEGER PRIMARY KEY,
    proposal INTEGER REFERENCES proposals (number),
    text TEXT NOT NULL,
    created TEXT NOT NULL
) STRICT;

CREATE TABLE events (
    id INTEGER PRIMARY KEY,
    kind TEXT NOT NULL CHECK (kind <> ''),
    text TEXT NOT NULL,
    data TEXT CHECK (json_type(data) = 'object'),
    created TEXT NOT NULL
) STRICT;

CREATE INDEX events_by_kind ON events (kind);

-- Rows are closed once and never change -----------------------------------------------------------------------------

CREATE TRIGGER trials_begin_running BEFORE INSERT ON trials WHEN NEW.state <> 'running'
BEGIN SELECT RAISE(ABORT, 'a trial begins running: its row exists before its job'); END;

CREATE TRIGGER trials_closed_once BEFORE UPDATE ON trials WHEN OLD.state <> 'running'
BEGIN SELECT RAISE(ABORT, 'the trial is closed: closed rows never change'); END;

CREATE TRIGGER trials_keep_identity BEFORE UPDATE ON trials
WHEN (NEW.id, NEW.role, NEW.epoch, NEW.config, NEW.config_digest, NEW.seed, NEW.replicate, NEW.budget, NEW.seal,
    NEW.device, NEW.sandbox, NEW.started) <> (OLD.id, OLD.role, OLD.epoch, OLD.config, OLD.config_digest, OLD.seed,
    OLD.replicate, OLD.budget, OLD.seal, OLD.device, OLD.sandbox, OLD.started) OR NEW.proposal IS NOT OLD.proposal
BEGIN SELECT RAISE(ABORT, 'what a trial is never changes, only how it ended'); END;

CREATE TRIGGER trials_stay BEFORE DELETE ON trials BEGIN SELECT RAISE(ABORT, 'trials are never deleted'); END;

CREATE TRIGGER trials_of_running_proposals BEFORE INSERT ON trials
WHEN NEW.proposal IS NOT NULL
    AND (SELECT state FROM proposals WHERE number = NEW.proposal) NOT IN ('running', 'decided')
BEGIN SELECT RAISE(ABORT, 'a trial needs a proposal that has started'); END;

CREATE TRIGGER proposals_begin_queued BEFORE INSERT ON proposals WHEN NEW.state <> 'queued'
BEGIN SELECT RAISE(ABORT, 'a proposal begins queued'); END;

CREATE TRIGGER proposals_closed_once BEFORE UPDATE ON proposals WHEN OLD.state NOT IN ('queued', 'running')
BEGIN SELECT RAISE(ABORT, 'the proposal is closed: closed rows never change'); END;

CREATE TRIGGER proposals_move_forward BEFORE UPDATE ON proposals
WHEN (OLD.state = 'queued' AND NEW.state NOT IN ('refused', 'duplicate', 'stale', 'running'))
    OR (OLD.state = 'running' AND NEW.state NOT IN ('running', 'decided'))
BEGIN SELECT RAISE(ABORT, 'a proposal goes from queued to running and decided, or from queued to a rejection'); END;

CREATE TRIGGER proposals_keep_words BEFORE UPDATE ON proposals
WHEN (NEW.number, NEW.source, NEW.diff, NEW.rationale, NEW.watch, NEW.created)
    <> (OLD.number, OLD.source, OLD.diff, OLD.rationale, OLD.watch, OLD.created)
    OR NEW.model IS NOT OLD.model OR NEW.requested_parent IS NOT OLD.requested_parent
    OR NEW.predicted_change IS NOT OLD.predicted_change OR NEW.confidence IS NOT OLD.confidence
    OR NEW.tokens IS NOT OLD.tokens OR NEW.cost_usd IS NOT OLD.cost_usd
    OR NEW.latency_seconds IS NOT OLD.latency_seconds
    OR (OLD.state = 'running' AND (NEW.parent IS NOT OLD.parent OR NEW.started IS NOT OLD.started))
BEGIN SELECT RAISE(ABORT, 'what was proposed never changes, only what became of it'); END;

CREATE TRIGGER proposals_decided_by_a_verdict BEFORE UPDATE ON proposals
WHEN NEW.state = 'decided' AND (
    NOT EXISTS (SELECT 1 FROM verdicts WHERE proposal = NEW.number)
    OR EXISTS (SELECT 1 FROM trials WHERE proposal = NEW.number AND state = 'running'))
BEGIN SELECT RAISE(ABORT, 'a proposal is decided by a verdict, once none of its trials is running'); END;

CREATE TRIGGER proposals_stay BEFORE DELETE ON proposals
BEGIN SELECT RAISE(ABORT, 'proposals are never deleted'); END;

CREATE TRIGGER verdicts_of_running_proposals BEFORE INSERT ON verdicts
WHEN (SELECT state FROM proposals WHERE number = NEW.proposal) IS NOT 'running'
BEGIN SELECT RAISE(ABORT, 'only a running proposal can be decided'); END;
CREATE TRIGGER verdicts_fixed BEFORE UPDATE ON verdicts BEGIN SELECT RAISE(ABORT, 'verdicts never change'); END;
CREATE TRIGGER verdicts_stay BEFORE DELETE ON verdicts BEGIN SELECT RAISE(ABORT, 'verdicts are never deleted'); END;

CREATE TRIGGER lineage_of_kept_proposals BEFORE INSERT ON lineage
WHEN NEW.proposal IS NOT NULL AND (SELECT decision FROM verdicts WHERE proposal = NEW.proposal) IS NOT 'kept'
BEGIN SELECT RAISE(ABORT, 'only kept proposals join the lineage'); END;
CREATE TRIGGER lineage_of_scored_trials BEFORE INSERT ON lineage
WHEN NOT EXISTS (SELECT 1 FROM trials
    WHERE id = NEW.trial AND state = 'scored' AND config_digest = NEW.config_digest AND proposal IS NEW.proposal)
BEGIN SELECT RAISE(ABORT, 'a lineage node stands on a scored trial of its own config'); END;
CREATE TRIGGER lineage_fixed BEFORE UPDATE ON lineage BEGIN SELECT RAISE(ABORT, 'the lineage never changes'); END;
CREATE TRIGGER lineage_stays BEFORE DELETE ON lineage BEGIN SELECT RAISE(ABORT, 'the lineage never shrinks'); END;

CREATE TRIGGER curves_of_running_trials BEFORE INSERT ON curves
WHEN (SELECT state FROM trials WHERE id = NEW.trial) IS NOT 'running'
BEGIN SELECT RAISE(ABORT, 'the trial is closed: its curve never changes'); END;
CREATE TRIGGER curves_fixed BEFORE UPDATE ON curves BEGIN SELECT RAISE(ABORT, 'curves never change'); END;
CREATE TRIGGER curves_stay BEFORE DELETE ON curves BEGIN SELECT RAISE(ABORT, 'curves are never deleted'); END;

CREATE TRIGGER document_nats_of_running_trials BEFORE INSERT ON document_nats
WHEN (SELECT state FROM trials WHERE id = NEW.trial) IS NOT 'running'
BEGIN SELECT RAISE(ABORT, 'the trial is closed: its scores never change'); END;
CREATE TRIGGER document_nats_fixed BEFORE UPDATE ON document_nats
BEGIN SELECT RAISE(ABORT, 'document scores never change'); END;
CREATE TRIGGER document_nats_stay BEFORE DELETE ON document_nats
BEGIN SELECT RAISE(ABORT, 'document scores are never deleted'); END;

CREATE TRIGGER study_fixed BEFORE UPDATE ON study BEGIN SELECT RAISE(ABORT, 'the study is sealed'); END;
CREATE TRIGGER study_stays BEFORE DELETE ON study BEGIN SELECT RAISE(ABORT, 'the study is sealed'); END;
CREATE TRIGGER insights_fixed BEFORE UPDATE ON insights BEGIN SELECT RAISE(ABORT, 'insights are append-only'); END;
CREATE TRIGGER insights_stay BEFORE DELETE ON insights BEGIN SELECT RAISE(ABORT, 'insights are append-only'); END;
CREATE TRIGGER events_fixed BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
CREATE TRIGGER events_stay BEFORE DELETE ON events BEGIN SELECT RAISE(ABORT, 'events are append-only'); END;
CREATE TRIGGER migrations_fixed BEFORE UPDATE ON migrations BEGIN SELECT RAISE(ABORT, 'migrations are append-only'); END;
CREATE TRIGGER migrations_stay BEFORE DELETE ON migrations BEGIN SELECT RAISE(ABORT, 'migrations are append-only'); END;

-- Views for people -------------------------------------------------------------------------------------------------

-- Scores that count for a config: at the study's budget, on the machine as it is now, and without the screening run
-- (replicate 0) that selected a proposal.
CREATE VIEW counted_scores AS
SELECT config_digest, replicate, score, id AS trial, proposal
FROM trials
WHERE state = 'scored'
    AND role NOT IN ('reference', 'final')
    AND budget = (SELECT budget FROM study)
    AND epoch = (SELECT max(epoch) FROM trials)
    AND (proposal IS NULL OR replicate > 0);

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
    (SELECT count(*) FROM trials t WHERE t.proposal = p.number) AS trials,
    (SELECT group_concat(DISTINCT t.state) FROM trials t WHERE t.proposal = p.number
        AND t.state NOT IN ('running', 'scored')) AS failures,
    (SELECT round(sum(t.train_seconds), 1) FROM trials t WHERE t.proposal = p.number) AS train_seconds,
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
    SELECT config_digest, min(proposal) AS proposal FROM trials WHERE state = 'scored' GROUP BY config_digest
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
    (SELECT avg(s.score) FROM counted_scores s WHERE s.config_digest = l.config_digest) AS score,
    (SELECT count(*) FROM counted_scores s WHERE s.config_digest = l.config_digest) AS replicates,
    v.difference,
    v.standard_error,
    p.rationale,
    v.reason,
    l.trial,
    l.checkpoint_digest
FROM chain
    JOIN lineage l ON l.node = chain.node
    LEFT JOIN proposals p ON p.number = l.proposal
    LEFT JOIN verdicts v ON v.proposal = l.proposal
ORDER BY step;
