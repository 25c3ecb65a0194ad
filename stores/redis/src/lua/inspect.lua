-- Reads one lock. KEYS: queue, L; ARGV: base, the number of queue entries to return.
local time = redis.call('TIME')
local queue, holds = {}, {}
for i, member in ipairs(redis.call('ZRANGE', KEYS[1], 0, ARGV[2] - 1)) do
  queue[i] = redis.call('HGET', ARGV[1] .. 'client:' .. string.sub(member, 33), string.sub(member, 1, 32)) or ''
end
local value = redis.call('GET', KEYS[2])
if value == 'lockkeeper' then
  local ids = redis.call('ZRANGE', ARGV[1] .. 'ends:' .. KEYS[2], 0, -1)
  for first = 1, #ids, 1000 do
    local part = redis.call('HMGET', ARGV[1] .. 'holds:' .. KEYS[2], unpack(ids, first, math.min(first + 999, #ids)))
    for _, packed in ipairs(part) do holds[#holds + 1] = packed or '' end
  end
elseif value then
  holds[1] = value
end
return { time[1] * 1000000 + time[2], redis.call('PTTL', KEYS[2]), holds, redis.call('ZCARD', KEYS[1]), queue }
