local let_in_key = BASE .. 'unconfirmed:' .. ARGV[3]
local answer = { redis.call('PEXPIRE', BASE .. 'client:' .. ARGV[3], ARGV[4]), 0, {} }
-- A lock that cannot be read does not keep the waiters of the others waiting.
local keys = {}
for _, key in ipairs(names_at(4, #KEYS - 3)) do
  if readable({ key }) then keys[#keys + 1] = key end
end
stay(names_at(4, #KEYS - 3))
serve(keys)
flush()
if redis.call('PTTL', let_in_key) < CLAIM * 2 then redis.call('PEXPIRE', let_in_key, CLAIM * 2) end
answer[2] = tonumber(redis.call('GET', COUNTER) or '0')
answer[3] = redis.call('SMEMBERS', let_in_key)
for i, key in ipairs(names_at(4, #KEYS - 3)) do
  local slot = slots[key]
  -- A key of another type is not a lock: a waiter learns that when it asks again.
  local state = not slot and 1 or slot.foreign and not slot.odd and 2 or slot.size > 0 and 1 or 0
  answer[i + 3] = { state, redis.call('PTTL', key) }
end
return answer
