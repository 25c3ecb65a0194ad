-- Takes a lock away from whoever has it. KEYS: counter, watched, held, waited, L.
local COUNTER, WATCHED, HELD, WAITED = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local BASE, CLAIM = ARGV[1], tonumber(ARGV[2])
