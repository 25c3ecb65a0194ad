-- Asks for a lock, or for several of one slot. KEYS: counter, watched, client, then L, M and Q of each name.
local COUNTER, WATCHED, CLIENT = KEYS[1], KEYS[2], KEYS[3]
local attempt, owner, info, client, BASE, names = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local ttl, delay, min_hold, mode = tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])
local waits, floor, CLAIM, wanted = ARGV[11] == '1', tonumber(ARGV[12]), tonumber(ARGV[13]), tonumber(ARGV[14])

-- One free lock without a line: the plain pattern, and the fence with it.
if #KEYS == 6 and redis.call('EXISTS', KEYS[6]) == 0
  and redis.call('SET', KEYS[4], attempt, 'NX', 'PX', ttl + delay) then
  local time = redis.call('TIME')
  local now_us = time[1] * 1000000 + time[2]
  local now = math.floor(now_us / 1000)
  local known = redis.call('MGET', COUNTER, WATCHED)
  local fence = math.max(tonumber(known[1] or '0') + 1, now_us, floor + 1)
  redis.call('SET', COUNTER, string.format('%.0f', fence))
  redis.call('SET', KEYS[5], struct.pack('>c32c32ddddI4I4I4BI4c0I2c0', attempt, owner, fence, now + ttl, now_us,
    min_hold > 0 and now + min_hold or 0, ttl, delay, mode, 0, 0, '', #info, info), 'PX', ttl + delay)
  if known[2] then
    redis.call('PUBLISH', known[2], string.format('granted %.0f %.0f %d ', fence, now_us, #KEYS[4]) .. KEYS[4] .. info)
  end
  return { 1, fence }
end
