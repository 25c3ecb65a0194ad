-- Changes one key of a lock while its slot is being migrated from one node of a cluster to another, and both may have keys of the lock.
-- A node runs a script that declares one key if it has that key. The script grants nothing, because no node sees the whole lock.
-- ARGV: base, the step, the attempt, the flags of a release, the highest fence that the release applies to (0: any), milliseconds.
-- Of a break: the reason in place of the attempt, and the new fence in place of the milliseconds. Of a revoke: the attempt or '' for
-- every hold, the new fence in place of the milliseconds, and the reason behind it.
local COUNTER, WATCHED, WAITED, FORCED = nil, nil, nil, false
local BASE, STEP, ATTEMPT, FLAGS, LIMIT, TIME_MS = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local REASON = ARGV[7]
local CLAIM = 0
