-- Revokes the holds of a lock: the server renews their leases no more. KEYS: counter, watched, waited, L; ARGV: base,
-- claim, reason, the highest fence seen, and the one attempt to revoke ('': every hold of the lock).
local COUNTER, WATCHED, WAITED, FORCED = KEYS[1], KEYS[2], KEYS[3], false
local BASE, CLAIM = ARGV[1], tonumber(ARGV[2])
