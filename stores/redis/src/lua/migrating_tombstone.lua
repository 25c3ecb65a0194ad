-- Writes a tombstone, or the flag that says that there are tombstones. KEYS: its key; ARGV: its value, its time to live.
local before = tonumber(redis.call('GET', KEYS[1]) or '0')
redis.call('SET', KEYS[1], math.max(before, tonumber(ARGV[1])), 'PX', ARGV[2])
return 1
