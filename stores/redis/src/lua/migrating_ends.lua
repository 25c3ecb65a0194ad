-- Changes the sorted set of the ends of holds to match their hash. KEYS: the sorted set; ARGV: the time to live of the lock key, then
-- each id with the time that its hold lasts from now on, or '' to remove it.
local time = redis.call('TIME')
local now = math.floor((time[1] * 1000000 + time[2]) / 1000)
local made = redis.call('EXISTS', KEYS[1]) == 0
local function prolong()
  local left = redis.call('PTTL', KEYS[1])
  if left ~= -1 or made then redis.call('PEXPIRE', KEYS[1], math.max(left, 2 * ARGV[1])) end
end
-- This write comes first because it needs no memory: a full server rejects no later write of the script.
prolong()
for i = 2, #ARGV, 2 do
  if ARGV[i + 1] ~= '' then
    redis.call('ZADD', KEYS[1], now + ARGV[i + 1], ARGV[i])
    prolong()
  end
end
-- Removals come last: a set without members is deleted, and this node may not access a missing key of the slot.
local gone = {}
for i = 2, #ARGV, 2 do
  if ARGV[i + 1] == '' then gone[#gone + 1] = ARGV[i] end
end
for first = 1, #gone, 1000 do
  if type(redis.pcall('ZCARD', KEYS[1])) ~= 'number' then break end
  redis.call('ZREM', KEYS[1], unpack(gone, first, math.min(first + 999, #gone)))
end
return 1
