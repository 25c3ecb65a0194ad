-- One lock as it is. KEYS: held, Q, L; ARGV: base, how much of the line is wanted.
local time = redis.call('TIME')
local line = {}
for i, member in ipairs(redis.call('ZRANGE', KEYS[2], 0, ARGV[2] - 1)) do
  line[i] = redis.call('HGET', ARGV[1] .. 'client:' .. string.sub(member, 33), string.sub(member, 1, 32)) or ''
end
return { time[1] * 1000000 + time[2], redis.call('GET', KEYS[3]) or '', redis.call('PTTL', KEYS[3]),
  redis.call('HGET', KEYS[1], KEYS[3]) or '', redis.call('ZCARD', KEYS[2]), line }
