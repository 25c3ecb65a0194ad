local keys = every(4, 3)

-- The same attempt again is the same ask: its fence stays, its lease counts anew.
local found, fence, raise = 0, nil, false
for _, key in ipairs(keys) do
  local h = hold_of(load(key), attempt)
  if h then found, fence = found + 1, h.fence end
  -- Let in by a server that has forgotten what we have seen: its number is not good enough.
  if h and h.flags == PENDING and h.owner == NONE and h.fence <= floor then raise = true end
end
if found > 0 then
  if raise and found == #keys then fence = next_fence(floor) end
  if wanted > fence and found == #keys then
    -- Names in several slots have one fence, the highest of them; what is granted here next is higher still.
    fence = wanted
    local last = tonumber(redis.call('GET', COUNTER) or '0')
    redis.call('SET', COUNTER, string.format('%.0f', math.max(last, wanted)))
  end
  for _, key in ipairs(keys) do
    local slot = load(key)
    local h, i = hold_of(slot, attempt)
    if h and found == #keys then
      h.expires, h.flags, h.fence, slot.dirty = now + h.ttl, 0, fence, true
    elseif h then
      -- A part of it was taken away: what is left is worth nothing.
      table.remove(slot.holds, i)
      slot.dirty = true
    end
  end
  if found == #keys then
    flush()
    return { 1, fence }
  end
end

local in_line = redis.call('HEXISTS', CLIENT, attempt) == 1
local v, what = verdict(keys, owner, mode, in_line and attempt .. client or nil)
if v == FREE or v == REENTER then
  if in_line then
    for _, key in ipairs(keys) do redis.call('ZREM', load(key).line, attempt .. client) end
    redis.call('HDEL', CLIENT, attempt)
  end
  fence = v == FREE and next_fence(floor) or what
  admit(keys, { attempt = attempt, owner = owner, fence = fence, expires = now + ttl, since = now_us,
    stays = min_hold > 0 and now + min_hold or 0, ttl = ttl, delay = delay, mode = mode, flags = 0, names = names,
    info = info })
  -- Others who waited behind it may share it.
  if in_line and mode > 0 then serve(every(4, 3)) end
  flush()
  return { 1, fence }
end

if v ~= BLOCKED or not waits then
  if in_line then
    leave(keys, attempt, client, info)
    serve(every(4, 3))
  end
elseif not in_line then
  local ticket = string.format('%.0f', next_fence(floor))
  for _, key in ipairs(keys) do
    redis.call('ZADD', BASE .. 'line:' .. key, ticket, attempt .. client)
    tell('waiting', key, 0, info)
  end
  redis.call('HSET', CLIENT, attempt,
    struct.pack(ASK, owner, now_us, ttl, delay, min_hold, mode, #names, names, #info, info))
end
if v == BLOCKED and waits then
  -- Both go with the process that waits; its polls keep them.
  redis.call('PEXPIRE', CLIENT, CLAIM)
  for _, key in ipairs(keys) do redis.call('PEXPIRE', BASE .. 'line:' .. key, CLAIM * 2) end
end
flush()
if v ~= BLOCKED then return { v == UPGRADE and 3 or 4 } end
return { waits and 2 or 0, what, redis.call('GET', what) or '', redis.call('PTTL', what),
  redis.call('GET', BASE .. 'held:' .. what) or '', redis.call('ZCARD', BASE .. 'line:' .. what), now }
