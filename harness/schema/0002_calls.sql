-- Calls to a language model, what they cost, and what came of them. A call's row exists before it is sent and counts at
-- its worst case until it is closed, so that a cap holds whatever dies in between.

CREATE TABLE calls (
    id INTEGER PRIMARY KEY,
    provider TEXT NOT NULL CHECK (provider <> ''),
    model TEXT NOT NULL CHECK (model <> ''),
    purpose TEXT NOT NULL CHECK (purpose IN ('check', 'probe', 'proposals', 'repair')),
    state TEXT NOT NULL CHECK (state IN ('in_flight', 'answered', 'failed', 'lost')),
    most_tokens INTEGER NOT NULL CHECK (most_tokens >= 0),
    most_usd REAL CHECK (most_usd >= 0 AND most_usd < 1e300),
    input_tokens INTEGER CHECK (input_tokens >= 0),
    cache_read_tokens INTEGER CHECK (cache_read_tokens >= 0),
    cache_write_tokens INTEGER CHECK (cache_write_tokens >= 0),
    output_tokens INTEGER CHECK (output_tokens >= 0),
    reasoning_tokens INTEGER CHECK (reasoning_tokens >= 0),
    billed_tokens INTEGER CHECK (billed_tokens >= 0),
    cost_usd REAL CHECK (cost_usd >= 0 AND cost_usd < 1e300),
    latency_seconds REAL CHECK (latency_seconds >= 0 AND latency_seconds < 1e300),
    trouble TEXT,
    error_text TEXT,
    begun TEXT NOT NULL,
    ended TEXT,
    CHECK ((state = 'in_flight') = (ended IS NULL)),
    CHECK ((state = 'in_flight') = (billed_tokens IS NULL)),
    CHECK ((state IN ('failed', 'lost')) = (trouble IS NOT NULL)),
    CHECK ((trouble IS NULL) = (error_text IS NULL))
) STRICT;

CREATE TRIGGER calls_begin_in_flight BEFORE INSERT ON calls WHEN NEW.state <> 'in_flight'
BEGIN SELECT RAISE(ABORT, 'a call begins in flight: its row exists before it is sent'); END;
CREATE TRIGGER calls_closed_once BEFORE UPDATE ON calls WHEN OLD.state <> 'in_flight'
BEGIN SELECT RAISE(ABORT, 'the call is closed: closed rows never change'); END;
CREATE TRIGGER calls_keep_identity BEFORE UPDATE ON calls
WHEN (NEW.id, NEW.provider, NEW.model, NEW.purpose, NEW.most_tokens, NEW.begun)
    <> (OLD.id, OLD.provider, OLD.model, OLD.purpose, OLD.most_tokens, OLD.begun) OR NEW.most_usd IS NOT OLD.most_usd
BEGIN SELECT RAISE(ABORT, 'what a call is never changes, only how it ended'); END;
CREATE TRIGGER calls_stay BEFORE DELETE ON calls BEGIN SELECT RAISE(ABORT, 'calls are never deleted'); END;

ALTER TABLE proposals ADD COLUMN call INTEGER REFERENCES calls (id);
ALTER TABLE proposals ADD COLUMN abort_if TEXT CHECK (json_type(abort_if) = 'object');
-- 1: it came through the inbox, from a person or another agent, and goes before what the proposer says.
ALTER TABLE proposals ADD COLUMN outside INTEGER NOT NULL DEFAULT 0 CHECK (outside IN (0, 1));

CREATE TRIGGER proposals_keep_origin BEFORE UPDATE ON proposals
WHEN NEW.call IS NOT OLD.call OR NEW.abort_if IS NOT OLD.abort_if OR NEW.outside <> OLD.outside
BEGIN SELECT RAISE(ABORT, 'what was proposed never changes, only what became of it'); END;

-- Who proposed what, and what came of it.
CREATE VIEW sources AS
SELECT p.source,
    p.model,
    count(*) AS proposals,
    sum(p.state = 'decided') AS decided,
    sum(v.decision IS 'kept') AS kept,
    sum(p.state IN ('refused', 'duplicate', 'stale')) AS turned_away,
    (SELECT count(*) FROM trials t JOIN proposals q ON q.number = t.proposal
        WHERE q.source = p.source AND q.model IS p.model AND t.role <> 'final'
            AND t.state IN ('out_of_memory', 'diverged', 'crashed', 'timed_out', 'invalid')) AS failed_trials,
    (SELECT sum(coalesce(c.billed_tokens, c.most_tokens)) FROM calls c
        WHERE c.provider = p.source AND c.model IS p.model) AS tokens,
    (SELECT iif(count(*) = count(coalesce(c.cost_usd, c.most_usd)), sum(coalesce(c.cost_usd, c.most_usd)), NULL)
        FROM calls c WHERE c.provider = p.source AND c.model IS p.model) AS cost_usd
FROM proposals p LEFT JOIN verdicts v ON v.proposal = p.number
GROUP BY p.source, p.model
ORDER BY min(p.number);
