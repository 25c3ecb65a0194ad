-- Asks the holder to release the lock: its lease is not renewed here any more. KEYS: L, V, counter; ARGV: reason.
-- Answers what the next fence must be above, and 1 if a holder was marked, 0 if there is none, 2 if it is another client's.
local counter, now = tonumber(redis.call('GET', KEYS[3]) or '0'), now_us()
local value = value_of(KEYS[1])
if not value then return { counter, now, 0 } end
local v = vote(KEYS[2], value)
if not v then return { counter, now, 2 } end
v.reason = ARGV[1]
redis.call('SET', KEYS[2], text(value, v), 'KEEPTTL')
return { counter, now, 1 }
