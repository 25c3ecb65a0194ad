-- Renews many holds. KEYS: counter, watched, held, waited, then L of each name; ARGV: base, claim, then for each hold its attempt and
-- how many names it has.
local COUNTER, WATCHED, HELD, WAITED = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local BASE, CLAIM = ARGV[1], tonumber(ARGV[2])
