-- What a process with asks in line does now and then, once for all of them: it says that it is still there, and lets
-- in whoever is next where a holder went without a word. KEYS: counter, watched, held, waited, then L of each name.
local COUNTER, WATCHED, HELD, WAITED = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local BASE, CLAIM = ARGV[1], tonumber(ARGV[2])
