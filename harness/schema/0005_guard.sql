-- Trials of the role reference (the untouched base model, scored) have no training, no weights and no budget. The guard
-- set's scores count for a config like those of val.

DROP VIEW counted_scores;

CREATE VIEW counted_scores AS
SELECT config_digest, replicate, score, accuracy, guard_score, id AS trial, proposal
FROM trials
WHERE state = 'scored'
    AND role NOT IN ('reference', 'final')
    AND budget = (SELECT budget FROM study)
    AND epoch = (SELECT max(epoch) FROM trials)
    AND (proposal IS NULL OR replicate > 0);

CREATE TRIGGER trials_trained_or_reference BEFORE INSERT ON trials
WHEN (NEW.role = 'reference') <> (NEW.budget = 'untrained')
    OR (NEW.role = 'reference' AND (NEW.proposal IS NOT NULL OR NEW.replicate <> 0))
BEGIN SELECT RAISE(ABORT, 'the untouched base is nobody''s proposal, is scored once and has no budget'); END;

CREATE TRIGGER references_have_no_weights BEFORE UPDATE ON trials
WHEN NEW.role = 'reference' AND (NEW.checkpoint_digest IS NOT NULL OR NEW.steps IS NOT NULL)
BEGIN SELECT RAISE(ABORT, 'the untouched base is not trained'); END;

CREATE TRIGGER trials_with_pairs_or_without BEFORE UPDATE ON trials
WHEN (NEW.scored_pairs IS NULL) <> (NEW.accuracy IS NULL)
    OR (NEW.score IS NULL AND (NEW.accuracy IS NOT NULL OR NEW.guard_score IS NOT NULL))
BEGIN SELECT RAISE(ABORT, 'an accuracy is that of scored pairs, and only a scored trial has one or a guard score'); END;

CREATE TRIGGER lineage_of_the_search BEFORE INSERT ON lineage
WHEN (SELECT role FROM trials WHERE id = NEW.trial) IN ('reference', 'final')
BEGIN SELECT RAISE(ABORT, 'a lineage node stands on a trial of the search'); END;
