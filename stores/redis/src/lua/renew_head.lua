-- Renews many holds. KEYS: counter, watched, waited, then L of each name; ARGV: the base, the claim, the client, then for each
-- hold its attempt and how many names it has. A reply is 1, 0 if the hold is gone, or the reason of its revoke.
local COUNTER, WATCHED, WAITED, FORCED = KEYS[1], KEYS[2], KEYS[3], false
local BASE, CLAIM, client = ARGV[1], tonumber(ARGV[2]), ARGV[3]
