-- What a process with queue entries does now and then, once for all of them: it says that it is still there, learns which of
-- them were let in, and lets in the next waiter where a holder ended without a release. KEYS: counter, watched, waited, then
-- L of each name; ARGV: base, claim, client, how long its queue entries are to last, and for each name the attempt of one of its
-- waiters that has not been woken ('' if there is none).
local COUNTER, WATCHED, WAITED, FORCED = KEYS[1], KEYS[2], KEYS[3], false
local BASE, CLAIM = ARGV[1], tonumber(ARGV[2])
