-- The lock table, as far as one script can see it.
--
-- A lock is two keys and a record. The lock key L is what every other Redis lock client uses: it is there while the lock is
-- taken by anybody, it holds the attempt of the first holder (with a plus if its record is no plain one, or MARK if there is
-- none to name), and it goes when the lock is free. Its record, a field of HELD, lists the holds: mode, fence, owner, when it ends. Q is the line. Without L nobody
-- holds, whatever the record says; an L that is not the attempt of a hold on record belongs to somebody else's client.

local MARK, NONE = 'lockkeeper', string.rep('-', 32)
-- A hold: fence, when it ends (ms), since when (us), the end of its minimum (ms), and then what the client said when it
-- asked, its terms: attempt, owner, ttl, delay, mode, flags, names, holder. A record is P or X and then its holds. An ask in
-- line: what its record is to begin with, since when, minimum, terms.
local HOLD = '>ddddc32c32I4I4I4BI4c0I2c0'
local ASK = '>c1ddc32c32I4I4I4BI4c0I2c0'
local PENDING, LINGERING, DELAY = 1, 2, 4 -- flags of a hold: not confirmed yet; released; only kept back
local FREE, REENTER, UPGRADE, BLOCKED, MIXED, ODD, FULL = 0, 1, 2, 3, 4, 5, 6

local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now = math.floor(now_us / 1000)
local watched = redis.call('GET', WATCHED)
local slots = {}

-- A server whose memory is full refuses a script's first write if that needs memory, and no later one. What is held must
-- go on and end all the same: then this comes first, which needs none and changes nothing.
local pressed = false
local function press_on()
  if not pressed then redis.call('PERSIST', COUNTER) end
  pressed = true
end

-- Never back: neither when the clock is set back, nor when the counter is lost, nor behind what a client has seen. Nil if
-- the server is full, and nothing was said before to press on.
local function next_fence(floor)
  local last = tonumber(redis.call('GET', COUNTER) or '0')
  local fence = math.max(last + 1, now_us, floor + 1)
  local set = redis.pcall('SET', COUNTER, fence)
  if not set.err then return fence end
  if not string.find(set.err, 'OOM', 1, true) then error(set) end
end

-- A message is a hint: it must not end a script in the middle, also if the user has no right to the channel.
local function tell(kind, key, fence, rest)
  if watched then
    redis.pcall('PUBLISH', watched, string.format('%s %.0f %.0f %d ', kind, fence, now_us, #key) .. key .. rest)
  end
end

local function split(names)
  local list, at = {}, 1
  while at <= #names do
    list[#list + 1], at = struct.unpack('>I2c0', names, at)
  end
  return list
end

-- Reads one lock and drops what is over.
local function load(key)
  if slots[key] then return slots[key] end
  local slot = { key = key, line = BASE .. 'line:' .. key, holds = {} }
  slots[key] = slot
  slot.value = redis.pcall('GET', key)
  if type(slot.value) == 'table' then
    -- Something that is no lock is kept under this name.
    slot.value, slot.foreign, slot.odd = nil, true, true
    return slot
  end
  if not slot.value then return slot end
  local packed = redis.call('HGET', HELD, key) or ''
  local all, ours, at = {}, slot.value == MARK, 2
  while at <= #packed do
    local h = {}
    h.fence, h.expires, h.since, h.stays, h.attempt, h.owner, h.ttl, h.delay, h.mode, h.flags, h.names, h.info, at =
      struct.unpack(HOLD, packed, at)
    ours = ours or h.attempt == slot.value or h.attempt .. '+' == slot.value
    all[#all + 1] = h
  end
  slot.foreign = not ours
  if slot.foreign then return slot end
  for _, h in ipairs(all) do
    if h.expires > now + h.ttl then
      -- The clock was set back: nothing stays for longer than it was given in the first place.
      h.expires, slot.dirty = now + h.ttl, true
    end
    if h.expires > now then
      slot.holds[#slot.holds + 1] = h
    else
      slot.dirty = true
      if h.flags <= PENDING then tell('expired', key, h.fence, h.info) end
      if h.flags == 0 and h.delay > 0 and h.expires + h.delay > now then
        slot.holds[#slot.holds + 1] = { attempt = NONE, owner = NONE, fence = h.fence, expires = h.expires + h.delay,
          since = h.since, stays = 0, ttl = h.delay, delay = 0, mode = 0, flags = DELAY, names = '', info = '' }
      end
    end
  end
  return slot
end

local function save(slot)
  local value, last, packed = MARK, 0, {}
  for i, h in ipairs(slot.holds) do
    if h.flags <= PENDING and value == MARK then value = h.attempt end
    -- A hold with a delay stays on record behind its end, so that the delay can follow.
    last = math.max(last, h.expires + (h.flags == 0 and h.delay or 0))
    packed[i] = struct.pack(HOLD, h.fence, h.expires, h.since, h.stays, h.attempt, h.owner, h.ttl, h.delay, h.mode,
      h.flags, #h.names, h.names, #h.info, h.info)
  end
  if #packed == 0 then
    redis.call('DEL', slot.key)
    redis.call('HDEL', HELD, slot.key)
  else
    local h = slot.holds[1]
    -- P: one holder, alone, and nothing of it outlasts a release. Then a release needs to know no more.
    local plain = #packed == 1 and h.flags <= PENDING and h.mode == 0 and h.owner == NONE and h.stays == 0
      and h.delay == 0 and h.names == ''
    if value ~= MARK and not plain then value = value .. '+' end
    redis.call('SET', slot.key, value, 'PX', last - now)
    redis.call('HSET', HELD, slot.key, (plain and 'P' or 'X') .. table.concat(packed))
    if redis.call('PTTL', HELD) < last - now then redis.call('PEXPIRE', HELD, 2 * (last - now)) end
  end
end

local function flush()
  for _, slot in pairs(slots) do
    if slot.dirty then
      press_on()
      save(slot)
      slot.dirty = false
    end
  end
end

local function covers(held, asked)
  return held == 0 or (held == 1 and asked == 1) or (held >= 2 and asked >= held)
end

-- The rule of admission for one name: core/src/rules.rs, in another language.
local function judge(slot, owner, mode)
  if slot.foreign then return BLOCKED end
  local blocked, mine, count, seen, limit = false, false, 0, {}, mode >= 2 and mode - 1 or 1e9
  for _, h in ipairs(slot.holds) do
    if owner ~= NONE and h.owner == owner then
      if covers(h.mode, mode) then return REENTER, h.fence end
      mine = true
    elseif h.flags ~= DELAY and mode == 1 and h.mode == 1 then -- readers share
    elseif h.flags ~= DELAY and mode >= 2 and h.mode >= 2 then
      limit = math.min(limit, h.mode - 1)
      if not seen[h.fence] then seen[h.fence], count = true, count + 1 end
    else
      blocked = true
    end
  end
  if mine then return UPGRADE end
  if blocked or count >= limit then return BLOCKED end
  return FREE
end

-- The first in line whose process is still there.
local function front(slot)
  while true do
    local member = redis.call('ZRANGE', slot.line, 0, 0)[1]
    if not member then return nil end
    local ask = redis.call('HGET', BASE .. 'client:' .. string.sub(member, 33), string.sub(member, 1, 32))
    if ask then return member, ask end
    redis.call('ZREM', slot.line, member)
  end
end

-- What the rule says about all names together. `place` is the ask's own place in line, if it has one.
local function verdict(keys, owner, mode, place)
  local mine, fence, blocked = 0, nil, nil
  for _, key in ipairs(keys) do
    local slot = load(key)
    if slot.odd then return ODD, key end
    local v, f = judge(slot, owner, mode)
    if v == UPGRADE then return UPGRADE end
    if v == REENTER then
      mine = mine + 1
      if fence and fence ~= f then blocked = blocked or key end
      fence = f
    elseif v == FREE then
      local first = front(slot)
      if first and first ~= place then v = BLOCKED end
    end
    if v == BLOCKED then blocked = blocked or key end
  end
  if fence then
    if mine == #keys and not blocked then return REENTER, fence end
    if not place then return MIXED end
    return BLOCKED, blocked or keys[1]
  end
  if blocked then return BLOCKED, blocked end
  return FREE
end

local function admit(keys, h)
  for _, key in ipairs(keys) do
    local slot, copy = load(key), {}
    for k, v in pairs(h) do copy[k] = v end
    slot.holds[#slot.holds + 1], slot.dirty = copy, true
    tell('granted', key, h.fence, h.info)
  end
end

-- Lets in those who are first in line, for as long as the rule lets them, and tells them.
local function serve(keys)
  local i = 1
  while i <= #keys do
    local again = false
    local member, packed = front(load(keys[i]))
    if member then
      local _, _, hold, _, owner, ttl, delay, mode, _, names, info = struct.unpack(ASK, packed)
      local all = names == '' and { keys[i] } or split(names)
      local v, fence = verdict(all, owner, mode, member)
      if v == FREE or v == REENTER then
        press_on()
        if v == FREE then fence = next_fence(0) end
        local attempt, client = string.sub(member, 1, 32), string.sub(member, 33)
        for _, key in ipairs(all) do
          redis.call('ZREM', load(key).line, member)
          if key ~= keys[i] then keys[#keys + 1] = key end
        end
        redis.call('HDEL', BASE .. 'client:' .. client, attempt)
        -- It has as long as its claim lasts to say that it is still there; then it has the whole of its ttl.
        local lease = math.min(ttl, CLAIM)
        admit(all, { attempt = attempt, owner = owner, fence = fence, expires = now + lease,
          since = now_us, stays = hold > 0 and now + hold or 0, ttl = ttl, delay = delay, mode = mode, flags = PENDING,
          names = names, info = info })
        redis.pcall('PUBLISH', 'lockkeeper:wake:' .. client, attempt .. string.format('%.0f %.0f', fence, lease))
        again = mode > 0
      end
    end
    if not again then i = i + 1 end
  end
end

-- The lines stay for as long as somebody in them is heard of; and while there is any, that is on record, so that others need
-- not look for lines where there are none.
local function stay(keys)
  for _, key in ipairs(keys) do redis.call('PEXPIRE', BASE .. 'line:' .. key, CLAIM * 2) end
  if redis.call('PTTL', WAITED) < CLAIM * 2 then redis.call('SET', WAITED, '1', 'PX', CLAIM * 3) end
end

-- Takes an ask out of its lines.
local function leave(keys, attempt, client, info)
  for _, key in ipairs(keys) do
    redis.call('ZREM', BASE .. 'line:' .. key, attempt .. client)
    tell('left', key, 0, info)
  end
  redis.call('HDEL', BASE .. 'client:' .. client, attempt)
end

-- The hold of an attempt in one lock, if it is still good.
local function hold_of(slot, attempt)
  for i, h in ipairs(slot.holds) do
    if h.attempt == attempt and h.flags <= PENDING then return h, i end
  end
end

-- The lock keys of `count` names whose keys begin at KEYS[first].
local function names_at(first, count)
  local list = {}
  for i = 1, count do list[i] = KEYS[first + i - 1] end
  return list
end
