-- Renews many holds. KEYS: counter, watched, then L and M of each name; ARGV: base, claim, then for each hold its attempt and
-- how many names it has.
local COUNTER, WATCHED, BASE, CLAIM = KEYS[1], KEYS[2], ARGV[1], tonumber(ARGV[2])
