
-- The lock key. Replies: 0 if the attempt does not hold here, 1 if the step is done, 2 if the holds are in the hash, -1 if another
-- client holds it; the revoked hold to a revoke, and the reason to a renewal of a revoked hold.
local key = KEYS[1]
local value = redis.pcall('GET', key)
if type(value) == 'table' then
  if STEP == 'break' or STEP == 'revoke' then return redis.error_reply('WRONGTYPE It is no lock') end
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
-- A plain hold is in the lock key itself.
local h = value and #value > 114 and string.sub(value, 66, 97) == NONE and not is_other_format(value)
  and read_hold(value)
if STEP == 'revoke' then
  if value and not h then return -1 end
  if not h or (ATTEMPT ~= '' and h.attempt ~= ATTEMPT) then return 0 end
  h.reason = REASON
  prolong(key, 1)
  redis.call('SET', key, pack_hold(h), 'KEEPTTL')
  emit('revoked', key, TIME_MS, REASON)
  publish()
  return { pack_hold(h) }
elseif STEP == 'break' then
  local deleted = redis.call('DEL', key)
  if value then emit('broken', key, TIME_MS, ATTEMPT) end
  publish()
  return deleted
end
if not h or h.attempt ~= ATTEMPT then return 0 end
if math.min(h.expires, now + h.ttl) <= now then return 0 end
if STEP == 'renew' then
  -- A revoked hold is not renewed.
  if h.reason then return { h.reason } end
  h.expires, h.flags = now + h.ttl, 0
  prolong(key, h.ttl)
  redis.call('SET', key, pack_hold(h), 'PX', h.ttl)
  return 1
elseif STEP == 'release' and applies_to(h) then
  local deleted = redis.call('DEL', key)
  emit('released', key, h.fence, h.info)
  publish()
  return deleted
end
return 0
