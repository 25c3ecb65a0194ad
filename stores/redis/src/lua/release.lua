-- During a migration the source node runs this script only if all of KEYS exist, so only while a client watches. Then the call fails if
-- one of these keys is not on this node.
local function is_here(keys)
  for _, key in ipairs(values[2] and keys or {}) do
    local found = redis.pcall('EXISTS', CLIENT, BASE .. 'unconfirmed:' .. client, BASE .. 'queue:' .. key,
      BASE .. 'holds:' .. key, BASE .. 'ends:' .. key)
    if type(found) == 'table' then return false end
  end
  return readable(keys)
end

-- A lock that cannot be read fails its own release only: others of this script may be done already.
for _, one in ipairs(rest) do one[8] = is_here(names_at(one[3], one[4])) end
serve(slow)

-- Flags: a guard exists although the hold is not confirmed; no caller learned of the grant; a request of the attempt may still arrive;
-- release only a queue entry or an unconfirmed hold, for which no guard exists.
local GUARDED, UNREPORTED, UNANSWERED, UNCONFIRMED = 1, 2, 4, 8
local function has(flags, flag) return math.floor(flags / flag) % 2 == 1 end

local function leave_tombstone(attempt, generation)
  press_on()
  local tombstone = BASE .. 'released:' .. attempt
  redis.call('SET', tombstone, math.max(generation, tonumber(redis.call('GET', tombstone) or '0')), 'PX', ARGV[4])
  redis.call('SET', BASE .. 'released', '1', 'PX', ARGV[4])
end

local function release_hold(slot, h, flags)
  emit('released', slot.key, h.fence, h.info)
  remove(slot, h.attempt)
  -- After the clock was set back, a minimum hold lasts no longer from now on than its whole time.
  local since = math.floor(h.since / 1000)
  local stays = math.min(h.stays, now + math.max(h.stays - since, 0))
  -- The minimum hold of a revoked lock does not apply.
  if stays > now and not h.reason and (h.flags == 0 or has(flags, GUARDED)) and not has(flags, UNREPORTED) then
    h.flags, h.expires, h.ttl = LINGERING, stays, stays - now
    add(slot, h)
  end
end

-- Whether the release applies to a fence or a ticket of a queue entry: the caller may have acquired again with the attempt, and got a
-- higher one.
local function applies_to(number, limit)
  return limit == 0 or tonumber(number or 0) <= limit
end

local function release(keys, attempt, flags, generation, limit)
  local gone, stays = 0, false
  if has(flags, UNANSWERED) then leave_tombstone(attempt, generation) end
  local packed = redis.call('HGET', CLIENT, attempt)
  if packed and applies_to(redis.call('ZSCORE', BASE .. 'queue:' .. keys[1], attempt .. client), limit) then
    local info = is_other_entry(packed) and '' or select(10, struct.unpack(ENTRY, packed))
    leave(keys, attempt, client, info)
    gone = 1
  end
  for _, key in ipairs(keys) do
    local slot = load(key)
    local h = find(slot, attempt)
    if h and not (has(flags, UNCONFIRMED) and h.flags == 0) and applies_to(h.fence, limit) then
      release_hold(slot, h, flags)
      gone = 1
    elseif h then
      stays = true
    end
  end
  -- The poll of the process must not find the hand-off again, also if its hold had ended before.
  if not stays then note(confirmed, client, attempt) end
  if gone == 1 then serve({ unpack(keys) }) end
  return gone
end

for _, one in ipairs(rest) do
  local attempt, i, first, count, flags, generation, limit, here = unpack(one)
  local understood, answer = true, UNREADABLE
  if here then understood, answer = guarded(release, names_at(first, count), attempt, flags, generation, limit) end
  answers[i] = understood and answer or OTHER_FORMAT
end
flush()
return answers
