-- Marks the holder as revoked: this node does not renew its lease any more. KEYS: L, V, counter; ARGV: reason.
-- Returns the counter and the clock, which the next fence must exceed, and 1 if a holder was marked, 0 if there is none, 2 if
-- another client holds the lock.
local counter, now = tonumber(redis.call('GET', KEYS[3]) or '0'), now_us()
local value = value_of(KEYS[1])
if not value then return { counter, now, 0 } end
local v = vote(KEYS[2], value)
if not v then return { counter, now, 2 } end
v.reason = ARGV[1]
redis.call('SET', KEYS[2], text(value, v), 'KEEPTTL')
return { counter, now, 1 }
