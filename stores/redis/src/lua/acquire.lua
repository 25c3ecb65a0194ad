-- Whether a guard knows the fence of a hold: a confirmed hold of the same owner has it.
local function reported(slot, h)
  local list = h.owner ~= NONE and get_field(slot, 'o' .. h.owner) or ''
  for at = 1, #list, 32 do
    local other = find(slot, string.sub(list, at, at + 31))
    if other.fence == h.fence and other.flags == 0 then return true end
  end
  return false
end

-- Changes the fence of a hold, and of the owner's other holds with the same fence.
local function change_fence(slot, h, fence)
  local before = h.fence
  local list = h.owner ~= NONE and get_field(slot, 'o' .. h.owner) or h.attempt
  for at = 1, #list, 32 do
    local other = find(slot, string.sub(list, at, at + 31))
    if other.fence == before then
      remove(slot, other.attempt)
      other.fence = fence
      add(slot, other)
    end
  end
end

-- The attempt holds all names already: it keeps its fence, and its lease starts again.
local function again(keys, attempt, wanted)
  local fence, raise
  local confirmed = true
  for _, key in ipairs(keys) do
    local h = find(load(key), attempt)
    confirmed = confirmed and h.flags == 0
    if h.reason then return { REVOKED_OWNER + 10, h.reason } end
    fence = h.fence
    -- If the server lost writes that this client has seen, the fence of the hand-off is too low. The counter does not show it,
    -- because another client may have raised it since. A shared holder keeps its fence if the counter was not behind: it must
    -- not pass holders that were granted after it.
    if h.flags == PENDING and h.fence <= floor and not reported(load(key), h) then
      raise = raise or h.mode == 0 or tonumber(redis.call('GET', COUNTER) or '0') < floor
    end
  end
  press_on()
  if raise then fence = next_fence(floor) end
  if wanted > fence then
    -- A grant of names in several slots has the highest fence of its parts; the next grant of this slot must be higher still.
    fence = wanted
    raise_counter(wanted)
  end
  for _, key in ipairs(keys) do
    local slot = load(key)
    local h = find(slot, attempt)
    if h.fence ~= fence then change_fence(slot, h, fence) end
    renew(slot, h, client)
  end
  return confirmed and { HELD_BEFORE, fence } or fence
end

-- Whether the request has an entry in each of its queues. A queue key may have been deleted or evicted.
local function is_queued(keys, attempt)
  if redis.call('HEXISTS', CLIENT, attempt) == 0 then return false end
  for _, key in ipairs(keys) do
    if not redis.call('ZSCORE', BASE .. 'queue:' .. key, attempt .. client) then
      redis.call('HDEL', CLIENT, attempt)
      return false
    end
  end
  return true
end

local function enqueue(keys, attempt, terms, kind, min_hold, info)
  local ticket = next_fence(floor)
  if not ticket then return false end
  for _, key in ipairs(keys) do
    redis.call('ZADD', BASE .. 'queue:' .. key, ticket, attempt .. client)
    emit('waiting', key, 0, info)
  end
  redis.call('HSET', CLIENT, attempt, struct.pack('>c1ddc0c0I4', kind, now_us, min_hold, attempt, terms, CLAIM))
  -- Its hand-off ended before it confirmed: the poll of its process must not report the hand-off again.
  if stage == 2 then redis.call('SREM', BASE .. 'unconfirmed:' .. client, attempt) end
  return true
end

-- The holds that a busy reply shows: of the 16 that end first, the three oldest.
local function shown(key)
  local value = redis.pcall('GET', key)
  if value ~= MARK then return { type(value) == 'string' and value or nil } end
  local ids = redis.call('ZRANGE', BASE .. 'ends:' .. key, 0, 15)
  local holds = {}
  for _, packed in ipairs(#ids > 0 and redis.call('HMGET', BASE .. 'holds:' .. key, unpack(ids)) or {}) do
    if packed then holds[#holds + 1] = packed end
  end
  table.sort(holds, function(a, b) return struct.unpack('>d', a, 50) < struct.unpack('>d', b, 50) end)
  return { unpack(holds, 1, math.min(#holds, 3)) }
end

local function acquire(keys, attempt, terms)
  local kind, waits, _, min_hold, wanted = struct.unpack('>c1BBI4d', head)
  local owner, ttl, delay, mode, names, info = struct.unpack('>c32I4I4I4I4c0I2c0', terms)
  waits = waits > 0
  -- A hold that this version cannot read ends the request here, before it has changed anything.
  for _, key in ipairs(owner ~= NONE and keys or {}) do
    local slot = load(key)
    local list = not slot.foreign and get_field(slot, 'o' .. owner) or ''
    for at = 1, #list, 32 do find(slot, string.sub(list, at, at + 31)) end
  end

  local found = 0
  for _, key in ipairs(keys) do
    if find(load(key), attempt) then found = found + 1 end
  end
  if found == #keys then return again(keys, attempt, wanted) end
  for _, key in ipairs(keys) do
    -- The attempt has lost some of its names, and so the whole grant.
    if find(load(key), attempt) then remove(load(key), attempt) end
  end

  local queued = is_queued(keys, attempt)
  local v, what = verdict(keys, owner, mode, queued and attempt .. client or nil)
  if v == FREE or v == REENTER then
    if queued then
      for _, key in ipairs(keys) do redis.call('ZREM', load(key).queue, attempt .. client) end
      redis.call('HDEL', CLIENT, attempt)
    end
    local fence = what
    if v == FREE then fence = next_fence(floor) end
    if not fence then return { FULL + 10 } end
    admit(keys, { attempt = attempt, owner = owner, fence = fence, expires = now + ttl, since = now_us,
      stays = min_hold > 0 and now + min_hold or 0, ttl = ttl, delay = delay, mode = mode, flags = 0, names = names,
      info = info })
    -- The next waiters may share the lock with it.
    if queued and mode > 0 then serve({ unpack(keys) }) end
    return fence
  end

  if v ~= BLOCKED or not waits then
    if queued then
      leave(keys, attempt, client, info)
      serve({ unpack(keys) })
    end
    if v ~= BLOCKED then return { v + 10, v == REVOKED_OWNER and what or nil } end
  else
    if not queued and not enqueue(keys, attempt, terms, kind, min_hold, info) then return { FULL + 10 } end
    -- The queue entries of a process expire together, unless the process polls.
    redis.call('PEXPIRE', CLIENT, (struct.unpack('>I4', head, 17)))
    stay(keys)
  end
  flush()
  return { waits and 2 or 0, what, waits and {} or shown(what), redis.call('PTTL', what), redis.call('ZCARD', BASE .. 'queue:' .. what), now,
    highest or tonumber(redis.call('GET', COUNTER) or '0') }
end

for _, one in ipairs(rest) do one[3] = readable(names_at(one[2], count)) end
for _, one in ipairs(rest) do
  local i, start, known = unpack(one)
  local attempt, terms = ARGV[i + 7], common
  if #attempt > 32 then attempt, terms = string.sub(attempt, 1, 32), string.sub(attempt, 33) end
  -- A lock that cannot be read fails its own request only: others of this script may have been granted already.
  local understood, answer = true, { UNREADABLE }
  if known then understood, answer = guarded(acquire, names_at(start, count), attempt, terms) end
  answers[i] = understood and answer or { OTHER_FORMAT }
end
flush()
return answers
