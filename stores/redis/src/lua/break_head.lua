-- Takes a lock away from its holders. KEYS: counter, watched, waited, L; ARGV: base, claim, reason, the highest fence seen.
local COUNTER, WATCHED, WAITED, FORCED = KEYS[1], KEYS[2], KEYS[3], true
local BASE, CLAIM = ARGV[1], tonumber(ARGV[2])
