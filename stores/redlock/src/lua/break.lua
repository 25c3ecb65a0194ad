-- Takes the lock from whoever has it. KEYS: L, V, counter; ARGV: channel. Answers what the next fence must be above.
local counter = tonumber(redis.call('GET', KEYS[3]) or '0')
if redis.call('DEL', KEYS[1], KEYS[2]) > 0 then redis.call('PUBLISH', ARGV[1], string.format('%.0f', counter + 1)) end
return { counter, now_us() }
