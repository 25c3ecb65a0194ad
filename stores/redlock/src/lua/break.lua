-- Deletes the lock, whichever client holds it. KEYS: L, V, counter; ARGV: channel. Returns the counter and the clock, which the
-- next fence must exceed.
local counter, now = tonumber(redis.call('GET', KEYS[3]) or '0'), now_us()
if redis.call('DEL', KEYS[1], KEYS[2]) > 0 then publish(ARGV[1], counter + 1) end
return { counter, now }
