-- Changes one key of a lock while its slot moves from one node of a cluster to another, and the keys of the lock may be on both.
-- A script that declares one key runs wherever that key is. It can grant nothing, because no node sees the whole lock.
-- ARGV: base, the step, the attempt, the flags of a release, the highest fence of what is meant (0: all), milliseconds.
-- Of a break: the reason in place of the attempt, and the new fence in place of the milliseconds.
local COUNTER, WATCHED, WAITED, FORCED = nil, nil, nil, false
local BASE, STEP, ATTEMPT, FLAGS, LIMIT, TIME_MS = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local CLAIM = 0
