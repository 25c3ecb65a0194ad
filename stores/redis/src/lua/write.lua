-- Writes or deletes a record if it is as expected. KEYS: counter, record; ARGV: the expectation (a version, 'absent' or
-- 'any'), the ttl in ms (0: for ever), the floor, 'write' or 'delete', the value.
-- A record is its version in sixteen digits, and the value behind it.
local found = redis.call('GET', KEYS[2])
local version = found and string.sub(found, 1, 16) or 'absent'
if ARGV[1] ~= 'any' and ARGV[1] ~= version then return { 0, found or '' } end
if ARGV[4] == 'delete' then
  return { 1, redis.call('DEL', KEYS[2]) }
end
local time = redis.call('TIME')
local last = tonumber(redis.call('GET', KEYS[1]) or '0')
local next = math.max(last + 1, time[1] * 1000000 + time[2], tonumber(ARGV[3]) + 1)
redis.call('SET', KEYS[1], next)
local value = string.format('%016.0f', next) .. ARGV[5]
if ARGV[2] == '0' then redis.call('SET', KEYS[2], value) else redis.call('SET', KEYS[2], value, 'PX', ARGV[2]) end
return { 1, next }
