-- What a process with asks in line does now and then, once for all of them: it says that it is still there, and lets
-- in whoever is next where a holder went without a word. KEYS: counter, watched, then L, M and Q of each name.
local COUNTER, WATCHED, BASE, CLAIM = KEYS[1], KEYS[2], ARGV[1], tonumber(ARGV[2])
