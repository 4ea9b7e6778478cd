-- Tasks beside pretraining: preference pairs have an accuracy, and a guard set is scored beside val.

ALTER TABLE curves RENAME COLUMN probe_bits_per_byte TO probe_score;
ALTER TABLE trials ADD COLUMN accuracy REAL CHECK (accuracy BETWEEN 0 AND 1);
ALTER TABLE trials ADD COLUMN scored_pairs INTEGER CHECK (scored_pairs > 0);
ALTER TABLE trials ADD COLUMN guard_score REAL CHECK (guard_score >= 0 AND guard_score < 1e300);
