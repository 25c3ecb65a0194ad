-- The poll of a process with waiters, once for all of them: it extends the life of their queue entries, returns their unconfirmed
-- hand-offs, and grants locks whose holder ended without a release to the next waiter. KEYS: counter, watched, waited, then
-- L of each name; ARGV: base, claim, client, the time to live of its queue entries, and for each name the attempt of one of its
-- waiters without a hand-off ('' if there is none).
local COUNTER, WATCHED, WAITED, FORCED = KEYS[1], KEYS[2], KEYS[3], false
local BASE, CLAIM = ARGV[1], tonumber(ARGV[2])
