-- Takes a lock away from whoever has it. KEYS: counter, watched, L, M, Q.
local COUNTER, WATCHED, BASE, CLAIM = KEYS[1], KEYS[2], ARGV[1], tonumber(ARGV[2])
