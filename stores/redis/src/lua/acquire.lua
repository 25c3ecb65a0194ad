local function ask(keys, attempt, terms)
  local mark, waits, _, min_hold, wanted = struct.unpack('>c1BBI4d', head)
  local owner, ttl, delay, mode, _, names, info = struct.unpack('>c32I4I4I4BI4c0I2c0', terms)
  waits = waits > 0

  -- The same attempt again is the same ask: its fence stays, its lease counts anew.
  local found, fence, raise = 0, nil, false
  for _, key in ipairs(keys) do
    local h = hold_of(load(key), attempt)
    if h then found, fence = found + 1, h.fence end
    -- Let in by a server that has forgotten what we have seen: its number may not be good enough.
    if h and h.flags == PENDING and h.owner == NONE and h.fence <= floor then
      raise = tonumber(redis.call('GET', COUNTER) or '0') < floor
    end
  end
  if found == #keys then
    press_on()
    if raise then fence = next_fence(floor) end
    if wanted > fence then
      -- Names in several slots have one fence, the highest of them; what is granted here next is higher still.
      fence = wanted
      redis.call('SET', COUNTER, math.max(tonumber(redis.call('GET', COUNTER) or '0'), wanted))
    end
    for _, key in ipairs(keys) do
      local slot = load(key)
      local h = hold_of(slot, attempt)
      h.expires, h.flags, h.fence, slot.dirty = now + h.ttl, 0, fence, true
    end
    return fence
  end
  for _, key in ipairs(keys) do
    -- A part of it was taken away: what is left is worth nothing.
    local slot = load(key)
    local h, i = hold_of(slot, attempt)
    if h then
      table.remove(slot.holds, i)
      slot.dirty = true
    end
  end

  local in_line = redis.call('HEXISTS', CLIENT, attempt) == 1
  local v, what = verdict(keys, owner, mode, in_line and attempt .. client or nil)
  if v == FREE or v == REENTER then
    if in_line then
      for _, key in ipairs(keys) do redis.call('ZREM', load(key).line, attempt .. client) end
      redis.call('HDEL', CLIENT, attempt)
    end
    fence = what
    if v == FREE then fence = next_fence(floor) end
    if not fence then return { FULL + 10 } end
    admit(keys, { attempt = attempt, owner = owner, fence = fence, expires = now + ttl, since = now_us,
      stays = min_hold > 0 and now + min_hold or 0, ttl = ttl, delay = delay, mode = mode, flags = 0, names = names,
      info = info })
    -- Others who waited behind it may share it.
    if in_line and mode > 0 then serve({ unpack(keys) }) end
    return fence
  end

  if v ~= BLOCKED or not waits then
    if in_line then
      leave(keys, attempt, client, info)
      serve({ unpack(keys) })
    end
    if v ~= BLOCKED then return { v + 10 } end
  else
    if not in_line then
      local ticket = next_fence(floor)
      if not ticket then return { FULL + 10 } end
      for _, key in ipairs(keys) do
        redis.call('ZADD', BASE .. 'line:' .. key, ticket, attempt .. client)
        tell('waiting', key, 0, info)
      end
      redis.call('HSET', CLIENT, attempt, struct.pack('>c1ddc0c0', mark, now_us, min_hold, attempt, terms))
    end
    -- They go with the process that waits; its polls keep them.
    redis.call('PEXPIRE', CLIENT, CLAIM)
    stay(keys)
  end
  flush()
  return { waits and 2 or 0, what, redis.call('GET', what) or '', redis.call('PTTL', what),
    redis.call('HGET', HELD, what) or '', redis.call('ZCARD', BASE .. 'line:' .. what), now,
    tonumber(redis.call('GET', COUNTER) or '0') }
end

for _, one in ipairs(rest) do
  local i, first = unpack(one)
  local attempt, terms = ARGV[i + 7], common
  if #attempt > 32 then attempt, terms = string.sub(attempt, 1, 32), string.sub(attempt, 33) end
  answers[i] = ask(names_at(first, count), attempt, terms)
  flush()
end
return answers
