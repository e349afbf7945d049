CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT,  -- order of arrival, never reused
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    key TEXT,                       -- Idempotency-Key
    digest TEXT NOT NULL,           -- of the request: a repeated key must match it
    status TEXT NOT NULL,
    batch_key TEXT NOT NULL,        -- jobs with one key share loaded graphs and weights
    params TEXT NOT NULL,           -- JSON: the job, as in a prompts file
    public_fields TEXT NOT NULL,    -- JSON: fields that its owner sees
    progress INTEGER NOT NULL,      -- percent
    detail TEXT,                    -- JSON: stage and step
    created_at FLOAT NOT NULL,
    started_at FLOAT,
    completed_at FLOAT,
    error TEXT,                     -- JSON
    bytes INTEGER NOT NULL,         -- size of its folder
    worker TEXT,
    lease_until FLOAT,
    attempt INTEGER NOT NULL,       -- the fencing token: writes with an older one are ignored
    crash_count INTEGER NOT NULL,   -- workers that crashed since its last finished stage
    UNIQUE (owner, key)
);
CREATE INDEX IF NOT EXISTS jobs_by_status ON jobs (status, owner, number);
CREATE INDEX IF NOT EXISTS jobs_by_owner ON jobs (owner, number);
CREATE TABLE IF NOT EXISTS owners (  -- when a job of theirs started last, for fair turns
    owner TEXT NOT NULL PRIMARY KEY,
    served_at FLOAT NOT NULL
);
CREATE TABLE IF NOT EXISTS workers (
    worker TEXT NOT NULL PRIMARY KEY,
    seen_at FLOAT NOT NULL,
    state TEXT NOT NULL             -- JSON: loaded batch key, totals
);
