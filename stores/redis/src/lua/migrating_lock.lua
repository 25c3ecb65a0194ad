
-- The lock key. Answers: 0 if the attempt does not hold here, 1 if the step is done, 2 if the holds are in the hash.
local key = KEYS[1]
local value = redis.pcall('GET', key)
if type(value) == 'table' then
  if STEP == 'break' then return redis.error_reply('WRONGTYPE It is no lock') end
  return 0
end
if value == MARK then
  if STEP == 'keep' then
    prolong(key, TIME_MS)
    return 1
  elseif STEP == 'drop' then
    return redis.call('DEL', key)
  end
  return 2
end
if STEP == 'break' then
  if value then tell('broken', key, TIME_MS, ATTEMPT) end
  return redis.call('DEL', key)
end
if not value or #value <= 114 or string.sub(value, 1, 32) ~= ATTEMPT or string.sub(value, 66, 97) ~= NONE then return 0 end
local h = read_hold(value)
if math.min(h.expires, now + h.ttl) <= now then return 0 end
if STEP == 'renew' then
  -- A revoked hold is to end: the holder learns the reason from the usual script, or that it has no lease any more from this one.
  if h.reason then return 0 end
  h.expires, h.flags = now + h.ttl, 0
  prolong(key, h.ttl)
  redis.call('SET', key, pack_hold(h), 'PX', h.ttl)
  return 1
elseif STEP == 'release' and is_meant(h) then
  tell('released', key, h.fence, h.info)
  return redis.call('DEL', key)
end
return 0
