-- Takes the lock from whoever has it. KEYS: L, V, counter; ARGV: channel. Answers what the next fence must be above.
local counter, now = tonumber(redis.call('GET', KEYS[3]) or '0'), now_us()
if redis.call('DEL', KEYS[1], KEYS[2]) > 0 then publish(ARGV[1], counter + 1) end
return { counter, now }
