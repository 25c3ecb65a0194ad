-- Increments the fence counter. KEYS: the counter; ARGV: the highest fence seen.
local time = redis.call('TIME')
local last = tonumber(redis.call('GET', KEYS[1]) or '0')
local fence = math.max(last + 1, time[1] * 1000000 + time[2], tonumber(ARGV[1]) + 1)
redis.call('PERSIST', KEYS[1])
redis.call('SET', KEYS[1], fence)
return fence
