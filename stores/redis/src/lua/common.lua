-- The lock table: what all scripts of several keys share. Each script loads the locks that it needs.
--
-- The lock key L is the one that every other Redis lock client uses. It exists while any client holds the lock, and its value
-- identifies the holder:
--   * an attempt and the rest of a HOLD behind it: one exclusive holder without lock-delay or minimum hold (a plain hold);
--   * MARK: the holds are in a hash (a HOLD by id, the counts under '#', an index of owners) and a sorted set (ids by the end
--     of their lease) of this lock, so that the cost of one hold does not grow with their number;
--   * any other value belongs to another client.
-- Without L no client holds the lock, whatever else is stored. All keys of a lock expire together.

local MARK, NONE = 'lockkeeper', string.rep('-', 32)
-- Attempt, flags, fence, end (ms), start (us), end of the minimum hold (ms), and then the terms of the lock request: owner,
-- ttl, lock-delay, mode, names, holder. The reason of a revoked hold follows, and its flags have REVOKED added: so the mark is
-- read and written with the hold, ends with it, and no fast path that compares the flags takes it for an unmarked one.
local HOLD = '>c32Bddddc32I4I4I4I4c0I2c0'
-- A queue entry: its version in the upper four bits of the first byte, and 0 in the others if the hold will be a plain one; start of the
-- wait (us), minimum hold (ms), attempt, terms, the claim of the waiter's client (ms).
local ENTRY = '>Bddc32c32I4I4I4I4c0I2c0I4'
-- Flags of a hold: not confirmed by its waiter yet; released, but within its minimum hold; a lock-delay; revoked.
local PENDING, LINGERING, DELAY, REVOKED = 1, 2, 4, 8
-- The upper four bits of the flags of a hold, and of the first byte of a queue entry, are the version of its layout, as in codec.rs.
local HOLD_FORMAT, ENTRY_FORMAT, FORMAT_STEP = 0, 1, 16
local FREE, REENTER, UPGRADE, BLOCKED, MIXED, NOT_A_LOCK, FULL, REVOKED_OWNER = 0, 1, 2, 3, 4, 5, 6, 8
-- How many arguments one command takes: Lua's stack is limited.
local CHUNK = 1000
-- The least time, in ms, for which expired holds stay in the hash while a client watches: the next script that loads the lock reports
-- that they have expired.
local REPORTED_WITHIN = 600000

local time = redis.call('TIME')
local now_us = time[1] * 1000000 + time[2]
local now = math.floor(now_us / 1000)
local watched = WATCHED and redis.call('GET', WATCHED)
local slots, let_in, confirmed, messages = {}, {}, {}, {}
-- The longest lease of a hand-off of this script, in ms: for at least that long each process finds its hand-offs.
local longest = CLAIM

-- A full server rejects the first write of a script if that write needs memory, and no later one. Renewals and releases must work all
-- the same, so their scripts first write this, which needs no memory and changes nothing.
local pressed = false
local function press_on()
  if not pressed then redis.call('PERSIST', COUNTER) end
  pressed = true
end

-- The highest fence so far, and whether the counter still has to be written.
local highest, unwritten

-- The next fence. It never goes back: not when the clock is set back, not when the counter is lost, and not behind a fence that a client
-- has seen. Nil if the server is full and the script has not called `press_on`.
local function next_fence(floor)
  local first = not highest
  highest = math.max((highest or tonumber(redis.call('GET', COUNTER) or '0')) + 1, now_us, floor + 1)
  if not first then
    unwritten = true
    return highest
  end
  local set = redis.pcall('SET', COUNTER, highest)
  if not set.err then return highest end
  highest = nil
  if not string.find(set.err, 'OOM', 1, true) then
    -- The server rejected the script's first write, so the script has written nothing.
    error({ err = 'REFUSED ' .. set.err })
  end
end

local function raise_counter(fence)
  highest = math.max(highest or tonumber(redis.call('GET', COUNTER) or '0'), fence)
  unwritten = true
end

-- Publishes an event once the script has written what it is about: a server may still reject that.
local function emit(kind, key, fence, rest)
  if watched then
    messages[#messages + 1] = { watched, string.format('%s %.0f %.0f %d ', kind, fence, now_us, #key) .. key .. rest }
  end
end

-- Publishes the events and hand-offs of the script. A failure, such as a missing right to the channel, must not end the script.
local function publish()
  for _, message in ipairs(messages) do redis.pcall('PUBLISH', unpack(message)) end
  messages = {}
end

local function split(names)
  local list, at = {}, 1
  while at <= #names do
    list[#list + 1], at = struct.unpack('>I2c0', names, at)
  end
  return list
end

-- Calls a command with a key and a list of arguments of any length.
local function call_all(command, key, list)
  for first = 1, #list, CHUNK do
    redis.call(command, key, unpack(list, first, math.min(first + CHUNK - 1, #list)))
  end
end

-- Whether another version of Lockkeeper, whose format this one does not know, wrote a stored hold.
local function is_other_format(packed)
  return math.floor(string.byte(packed, 33) / FORMAT_STEP) ~= HOLD_FORMAT
end

-- Whether another version of Lockkeeper wrote a queue entry.
local function is_other_entry(packed)
  return math.floor(string.byte(packed) / FORMAT_STEP) ~= ENTRY_FORMAT
end

local function read_hold(packed)
  if is_other_format(packed) then error({ err = 'UNSUPPORTED a hold of another format' }) end
  local h, at = {}, nil
  h.attempt, h.flags, h.fence, h.expires, h.since, h.stays, h.owner, h.ttl, h.delay, h.mode, h.names, h.info, at =
    struct.unpack(HOLD, packed)
  if h.flags >= REVOKED then h.flags, h.reason = h.flags - REVOKED, string.sub(packed, at) end
  return h
end

local function pack_hold(h)
  local flags = h.reason and h.flags + REVOKED or h.flags
  return struct.pack(HOLD, h.attempt, flags, h.fence, h.expires, h.since, h.stays, h.owner, h.ttl, h.delay, h.mode,
    #h.names, h.names, #h.info, h.info) .. (h.reason or '')
end

-- A field of a lock's hash that is no hold: an index.
local function get_field(slot, field)
  if slot.fields[field] == nil then
    slot.fields[field] = slot.stored and redis.call('HGET', slot.holds, field) or false
  end
  return slot.fields[field]
end

local function set_field(slot, field, value)
  slot.fields[field], slot.changed_fields[field] = value, true
end

-- Adds a hold to the counts, or subtracts it. Admission needs only the counts, so its cost does not grow with the holds.
local function tally(slot, h, by)
  local counts = slot.counts
  slot.size = slot.size + by
  if h.flags == DELAY then
    counts.delays = counts.delays + by
  elseif h.mode == 0 then
    counts.exclusive = counts.exclusive + by
  elseif h.mode == 1 then
    counts.shared = counts.shared + by
  else
    local left = (counts.modes[h.mode] or 0) + by
    counts.modes[h.mode] = left > 0 and left or nil
    if h.owner ~= NONE then
      -- Holds of one owner with one fence are one permit.
      local field = string.format('f%.0f', h.fence)
      local same = tonumber(get_field(slot, field) or '0') + by
      set_field(slot, field, same > 0 and tostring(same))
      if same > 1 or (same == 1 and by < 0) then return end
    end
    counts.permits = counts.permits + by
  end
end

-- Enters a hold into the list of its owner, or takes it out.
local function index(slot, h, by)
  if h.owner == NONE or h.flags > PENDING then return end
  local field = 'o' .. h.owner
  local list = get_field(slot, field) or ''
  if by > 0 then
    list = list .. h.attempt
  else
    local at = string.find(list, h.attempt, 1, true)
    if at then list = string.sub(list, 1, at - 1) .. string.sub(list, at + 32) end
  end
  set_field(slot, field, list ~= '' and list)
end

local function add(slot, h)
  local id = h.flags <= PENDING and h.attempt or '~' .. h.attempt
  slot.known[id], slot.changed[id], slot.newest = h, true, id
  slot.slack = math.max(slot.slack, h.flags <= PENDING and h.delay or 0)
  tally(slot, h, 1)
  index(slot, h, 1)
end

local function remove(slot, id)
  local h = slot.known[id]
  slot.known[id], slot.changed[id] = false, true
  tally(slot, h, -1)
  index(slot, h, -1)
end

-- The hold with this id. The id of a hold is its attempt until its release or its end.
local function find(slot, id)
  if slot.known[id] == nil then
    local packed = slot.stored and redis.call('HGET', slot.holds, id)
    slot.known[id] = packed and read_hold(packed) or false
  end
  return slot.known[id] or nil
end

-- The ids of all holds of a lock.
local function ids_of(slot)
  local ids = {}
  for _, id in ipairs(slot.stored and redis.call('ZRANGE', slot.ends, 0, -1) or {}) do
    if slot.known[id] ~= false then ids[#ids + 1] = id end
  end
  for id, h in pairs(slot.known) do
    if h and not (slot.stored and redis.call('ZSCORE', slot.ends, id)) then ids[#ids + 1] = id end
  end
  return ids
end

-- Adds a lock-delay after a hold that ended without a release: no request is granted until `ends`.
local function hold_back(slot, h, ends)
  add(slot, { attempt = h.attempt, owner = NONE, fence = h.fence, expires = ends, since = h.since, stays = 0,
    ttl = h.delay, delay = 0, mode = 0, flags = DELAY, names = '', info = '' })
end

-- Whether a hold of the hash has a format of another version. It counts as held until a client of that version ends it, or until
-- the lock key expires: only that version knows its lock-delay.
local function is_left_alone(slot, id)
  if slot.known[id] ~= nil or not slot.stored then return false end
  local packed = redis.call('HGET', slot.holds, id)
  return packed and is_other_format(packed)
end

-- Calls a function, and returns whether it met no hold of another format. Such a hold must not fail the other requests of a script.
local function guarded(f, ...)
  local done, one, two = pcall(f, ...)
  if done then return true, one, two end
  local text = type(one) == 'table' and one.err or tostring(one)
  if string.find(text, 'UNSUPPORTED', 1, true) then return false end
  -- As a table: Redis puts another code before a text.
  error({ err = text })
end

-- Removes an expired hold. A lock-delay follows also if the waiter never confirmed its hand-off: it may have started its work.
local function expire(slot, id)
  if is_left_alone(slot, id) then return end
  local h = find(slot, id)
  if not h then
    -- The hold was released while its slot was being migrated: only its member of the sorted set was left.
    slot.changed[id] = true
    return
  end
  remove(slot, id)
  if h.flags > PENDING then return end
  emit('expired', slot.key, h.fence, h.info)
  if h.delay > 0 and h.expires + h.delay > now then hold_back(slot, h, h.expires + h.delay) end
end

-- After the clock was set back: limits a hold to one ttl from now.
local function clamp(slot, id)
  if is_left_alone(slot, id) then return end
  local h = find(slot, id)
  if h and h.expires > now + h.ttl then h.expires, slot.changed[id] = now + h.ttl, true end
end

-- Reads the counts of a lock's holds, and returns when they were written.
local function read_counts(slot, packed)
  local list = cmsgpack.unpack(packed)
  local counts = slot.counts
  counts.delays, counts.exclusive, counts.shared, counts.permits, slot.size, slot.slack = unpack(list, 1, 6)
  for i = 8, #list, 2 do counts.modes[list[i]] = list[i + 1] end
  return list[7]
end

local function pack_counts(slot)
  local counts = slot.counts
  local list = { counts.delays, counts.exclusive, counts.shared, counts.permits, slot.size, slot.slack, now }
  for mode, n in pairs(counts.modes) do list[#list + 1], list[#list + 2] = mode, n end
  return cmsgpack.pack(list)
end

local function load_stored(slot)
  local packed = redis.call('HGET', slot.holds, '#')
  slot.stored = true
  local written = packed and read_counts(slot, packed)
  -- Without a sorted set, the hash is left over from a release while the slot was being migrated.
  if not packed or (slot.size > 0 and redis.call('ZCARD', slot.ends) == 0) then
    if FORCED then return end
    -- Another node of the cluster has the holds, or an operator has deleted them: the holders are unknown.
    error({ err = 'TRYAGAIN The holds of a lock are not on this node' })
  end
  -- No lease is newer than the last write, so a clock behind that write was set back.
  if now + 1000 < written then
    for _, id in ipairs(ids_of(slot)) do clamp(slot, id) end
  end
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', slot.ends, '-inf', now)) do expire(slot, id) end
end

-- Reports to watchers the holds that expired together with their lock key. The hash outlives the lock key while a client watches.
local function report_expired(slot)
  for _, id in ipairs(redis.call('ZRANGE', slot.ends, 0, -1)) do
    local packed = redis.call('HGET', slot.holds, id)
    local h = packed and not is_other_format(packed) and read_hold(packed)
    if h and h.flags <= PENDING then emit('expired', slot.key, h.fence, h.info) end
  end
  press_on()
  redis.call('DEL', slot.holds, slot.ends)
end

-- A lock of which the script has read nothing yet.
local function new_slot(key)
  return { key = key, queue = BASE .. 'queue:' .. key, holds = BASE .. 'holds:' .. key, ends = BASE .. 'ends:' .. key,
    known = {}, changed = {}, fields = {}, changed_fields = {}, size = 0, slack = 0,
    counts = { delays = 0, exclusive = 0, shared = 0, permits = 0, modes = {} } }
end

-- Reads the keys of a lock and removes its expired holds.
local function read_slot(slot)
  local value = redis.pcall('GET', slot.key)
  if type(value) == 'table' then
    -- Another program keeps a value that is no lock under this key.
    slot.foreign, slot.not_a_lock = true, true
    return
  elseif value == MARK then
    return load_stored(slot)
  end
  if watched and redis.call('EXISTS', slot.ends) == 1 then report_expired(slot) end
  -- A hold of another format counts as another client's.
  if value and #value > 114 and string.sub(value, 66, 97) == NONE and not is_other_format(value) then
    local h = read_hold(value)
    slot.known[h.attempt], slot.newest = h, h.attempt
    tally(slot, h, 1)
    clamp(slot, h.attempt)
    if h.expires <= now then expire(slot, h.attempt) end
  else
    slot.foreign = value and true
  end
end

-- Loads one lock. A lock whose keys could not all be read is not loaded: to the next request of the script it would look free.
local function load(key)
  if not slots[key] then
    local slot = new_slot(key)
    read_slot(slot)
    slots[key] = slot
  end
  return slots[key]
end

-- Whether the holders of these locks are known. They are not while their slot is being migrated.
local function readable(keys)
  for _, key in ipairs(keys) do
    local read, why = pcall(load, key)
    -- `pcall` returns the error of a script as a table or as text.
    local text = type(why) == 'table' and why.err or tostring(why)
    local split = string.find(text, 'TRYAGAIN', 1, true) or string.find(text, 'non local key', 1, true)
    if not read and split then return false end
    if not read then error({ err = text }) end
  end
  return true
end

local function save_stored(slot)
  if not slot.stored then redis.call('DEL', slot.holds, slot.ends) end
  local sets, dels, scores, gone = {}, {}, {}, {}
  for id in pairs(slot.stored and slot.changed or slot.known) do
    local h = slot.known[id]
    if h then
      sets[#sets + 1], sets[#sets + 2] = id, pack_hold(h)
      scores[#scores + 1], scores[#scores + 2] = h.expires, id
    elseif slot.stored then
      dels[#dels + 1], gone[#gone + 1] = id, id
    end
  end
  for field in pairs(slot.stored and slot.changed_fields or slot.fields) do
    local value = slot.fields[field]
    if value then
      sets[#sets + 1], sets[#sets + 2] = field, value
    elseif slot.stored then
      dels[#dels + 1] = field
    end
  end
  sets[#sets + 1], sets[#sets + 2] = '#', pack_counts(slot)
  call_all('HDEL', slot.holds, dels)
  call_all('HSET', slot.holds, sets)
  call_all('ZREM', slot.ends, gone)
  call_all('ZADD', slot.ends, scores)
  slot.stored = true
  -- A hold with a lock-delay stays in the hash after its end, so that the delay can follow.
  local last = tonumber(redis.call('ZREVRANGE', slot.ends, 0, 0, 'WITHSCORES')[2]) + slot.slack - now
  redis.call('SET', slot.key, MARK, 'PX', last)
  local kept = watched and last + math.max(last, REPORTED_WITHIN) or last
  redis.call('PEXPIRE', slot.holds, kept)
  redis.call('PEXPIRE', slot.ends, kept)
end

local function save(slot)
  local h = slot.size == 1 and slot.newest and slot.known[slot.newest]
  local plain = h and h.flags <= PENDING and h.mode == 0 and h.owner == NONE and h.stays == 0 and h.delay == 0
    and h.names == '' and not watched
  if slot.size == 0 or plain then
    if slot.stored then redis.call('DEL', slot.holds, slot.ends) end
    slot.stored, slot.slack = false, 0
  end
  if slot.size == 0 then
    redis.call('DEL', slot.key)
  elseif plain then
    redis.call('SET', slot.key, pack_hold(h), 'PX', h.expires - now)
  else
    save_stored(slot)
  end
  slot.changed, slot.changed_fields, slot.dirty = {}, {}, false
end

-- Writes all changes. The counter comes first, because no fence may be stored before the counter has it.
local function flush()
  if unwritten then redis.call('SET', COUNTER, highest) end
  unwritten = false
  for _, slot in pairs(slots) do
    if slot.dirty or next(slot.changed) then
      press_on()
      save(slot)
    end
  end
  -- The unconfirmed hand-offs of each process: its poll finds those whose message was lost.
  for key, attempts in pairs(let_in) do
    call_all('SADD', key, attempts)
    if redis.call('PTTL', key) < longest * 2 then redis.call('PEXPIRE', key, longest * 2) end
  end
  for key, attempts in pairs(confirmed) do call_all('SREM', key, attempts) end
  let_in, confirmed = {}, {}
  -- The messages come last: a waiter acts on its message, so its hold must be stored before.
  publish()
end

local function note(list, client, attempt)
  local key = BASE .. 'unconfirmed:' .. client
  list[key] = list[key] or {}
  list[key][#list[key] + 1] = attempt
end

local function covers(held, wanted)
  return held == 0 or (held == 1 and wanted == 1) or (held >= 2 and wanted >= held)
end

-- The rule of admission for one name, as in core/src/admission.rs.
local function evaluate(slot, owner, mode)
  if slot.foreign then return BLOCKED end
  if slot.size == 0 then return FREE end
  local list = owner ~= NONE and get_field(slot, 'o' .. owner) or ''
  local fence, reasons = nil, {}
  for at = 1, #list, 32 do
    local h = find(slot, string.sub(list, at, at + 31))
    if h.reason then reasons[h.fence] = h.reason end
    if not fence and covers(h.mode, mode) then fence = h.fence end
  end
  if fence then return REENTER, fence, reasons[fence] end
  if list ~= '' then return UPGRADE end
  local counts = slot.counts
  if counts.delays + counts.exclusive > 0 or mode == 0 then return BLOCKED end
  if mode == 1 then return next(counts.modes) and BLOCKED or FREE end
  local limit = mode - 1
  for other in pairs(counts.modes) do limit = math.min(limit, other - 1) end
  if counts.shared > 0 or counts.permits >= limit then return BLOCKED end
  return FREE
end

-- The first entry of a queue whose process is still there.
local function front(slot)
  while true do
    local member = redis.call('ZRANGE', slot.queue, 0, 0)[1]
    if not member then return nil end
    local entry = redis.call('HGET', BASE .. 'client:' .. string.sub(member, 33), string.sub(member, 1, 32))
    if entry then return member, entry end
    redis.call('ZREM', slot.queue, member)
  end
end

-- The rule of admission for all names of a request together. `entry` is the queue entry of the request, if it has one.
local function verdict(keys, owner, mode, entry)
  local mine, fence, blocked, reason = 0, nil, nil, nil
  for _, key in ipairs(keys) do
    local slot = load(key)
    if slot.not_a_lock then return NOT_A_LOCK, key end
    local v, f, revoked = evaluate(slot, owner, mode)
    reason = reason or revoked
    if v == UPGRADE then return UPGRADE end
    if v == REENTER then
      mine = mine + 1
      if fence and fence ~= f then blocked = blocked or key end
      fence = f
    elseif v == FREE then
      local first = front(slot)
      if first and first ~= entry then v = BLOCKED end
    end
    if v == BLOCKED then blocked = blocked or key end
  end
  if fence then
    -- An owner does not re-enter a hold that is revoked.
    if mine == #keys and not blocked and reason then return REVOKED_OWNER, reason end
    if mine == #keys and not blocked then return REENTER, fence end
    if not entry then return MIXED end
    return BLOCKED, blocked or keys[1]
  end
  if blocked then return BLOCKED, blocked end
  return FREE
end

local function admit(keys, h)
  for _, key in ipairs(keys) do
    local copy = {}
    for k, v in pairs(h) do copy[k] = v end
    add(load(key), copy)
    emit('granted', key, h.fence, h.info)
  end
end

-- Grants the locks to the first waiters of each queue, for as long as the rule admits them, and notifies them. A waiter of another version
-- keeps its position: the poll of its own process grants the lock to it.
local function serve(keys)
  local i = 1
  while i <= #keys do
    local again = false
    local member, packed = front(load(keys[i]))
    if member and not is_other_entry(packed) then
      local _, _, hold, _, owner, ttl, delay, mode, names, info, claim = struct.unpack(ENTRY, packed)
      local all = names == '' and { keys[i] } or split(names)
      local v, fence, known = BLOCKED, nil, readable(all)
      if known then known, v, fence = guarded(verdict, all, owner, mode, member) end
      if not known then v = BLOCKED end
      if v == FREE or v == REENTER then
        press_on()
        if v == FREE then fence = next_fence(0) end
        local attempt, client = string.sub(member, 1, 32), string.sub(member, 33)
        for _, key in ipairs(all) do
          redis.call('ZREM', load(key).queue, member)
          if key ~= keys[i] then keys[#keys + 1] = key end
        end
        redis.call('HDEL', BASE .. 'client:' .. client, attempt)
        note(let_in, client, attempt)
        -- The waiter has its own client's claim to confirm: the client that releases may have a shorter one. Then it has the whole
        -- of its ttl.
        local lease = math.min(ttl, claim)
        longest = math.max(longest, lease)
        admit(all, { attempt = attempt, owner = owner, fence = fence, expires = now + lease,
          since = now_us, stays = hold > 0 and now + hold or 0, ttl = ttl, delay = delay, mode = mode, flags = PENDING,
          names = names, info = info })
        messages[#messages + 1] = { 'lockkeeper:wake:' .. client, attempt .. string.format('%.0f %.0f', fence, lease) }
        again = mode > 0
      end
    end
    if not again then i = i + 1 end
  end
end

-- Extends the life of queues whose clients poll, and of the flag that says that there is any queue: without the flag, scripts look for no
-- queue. It never shortens a life, because another client of the queue may have a longer claim.
local function stay(keys)
  for _, key in ipairs(keys) do
    local queue = BASE .. 'queue:' .. key
    if redis.call('PTTL', queue) < CLAIM * 2 then redis.call('PEXPIRE', queue, CLAIM * 2) end
  end
  if redis.call('PTTL', WAITED) < CLAIM * 2 then redis.call('SET', WAITED, '1', 'PX', CLAIM * 3) end
end

-- Takes a lock request out of its queues.
local function leave(keys, attempt, client, info)
  for _, key in ipairs(keys) do
    redis.call('ZREM', BASE .. 'queue:' .. key, attempt .. client)
    emit('left', key, 0, info)
  end
  redis.call('HDEL', BASE .. 'client:' .. client, attempt)
end

-- Confirms a hold, or renews it.
local function renew(slot, h, client)
  if h.flags == PENDING then note(confirmed, client, h.attempt) end
  h.expires, h.flags, slot.changed[h.attempt] = now + h.ttl, 0, true
end

-- Loads locks before the script changes any: a lock that cannot be read ends the script before its first write.
local function load_all(keys)
  for _, key in ipairs(keys) do load(key) end
end

-- The lock keys of `count` names whose keys begin at KEYS[first].
local function names_at(first, count)
  local list = {}
  for i = 1, count do list[i] = KEYS[first + i - 1] end
  return list
end
