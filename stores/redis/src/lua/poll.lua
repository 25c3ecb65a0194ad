local let_in_key = BASE .. 'unconfirmed:' .. ARGV[3]
local answer = { redis.call('PEXPIRE', BASE .. 'client:' .. ARGV[3], ARGV[4]), 0, {} }
-- A lock that cannot be read does not delay the waiters of the other locks.
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
-- The entries of a process do not always end together: a hand-off may have ended while the process was cut off, or all entries
-- expired and a newer request has made new ones. So the script looks for the oldest waiter of each name.
local function is_kept(key, attempt)
  if attempt == '' or redis.call('SISMEMBER', let_in_key, attempt) == 1 then return 1 end
  if redis.call('HEXISTS', BASE .. 'client:' .. ARGV[3], attempt) == 0 then return 0 end
  return redis.call('ZSCORE', BASE .. 'queue:' .. key, attempt .. ARGV[3]) and 1 or 0
end

for i, key in ipairs(names_at(4, #KEYS - 3)) do
  local slot = slots[key]
  -- A key of another type is no lock: the waiter gets that error when it sends its request again.
  local state = not slot and 1 or slot.foreign and not slot.not_a_lock and 2 or slot.size > 0 and 1 or 0
  answer[i + 3] = { state, redis.call('PTTL', key), is_kept(key, ARGV[i + 4]) }
end
return answer
