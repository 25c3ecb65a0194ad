-- A node that gives its slot away runs this only if all of KEYS exist, so only while a client watches. Then each of these calls
-- fails if a key of the lock is not on this node.
local function is_here(keys)
  for _, key in ipairs(values[2] and keys or {}) do
    local found = redis.pcall('EXISTS', CLIENT, BASE .. 'unconfirmed:' .. client, BASE .. 'queue:' .. key,
      BASE .. 'holds:' .. key, BASE .. 'ends:' .. key)
    if type(found) == 'table' then return false end
  end
  return readable(keys)
end

-- Other releases of this script may have been carried out already: one lock does not fail them.
for _, one in ipairs(rest) do one[8] = is_here(names_at(one[3], one[4])) end
serve(slow)

-- Flags: a guard exists though the hold is not confirmed; no caller ever learned of the grant; a request of the attempt may
-- still arrive; only what no guard can stand for, which is a queue entry or a hold that is not confirmed.
local GUARDED, UNREPORTED, UNANSWERED, UNCONFIRMED = 1, 2, 4, 8
local function has(flags, flag) return math.floor(flags / flag) % 2 == 1 end

local function leave_tombstone(attempt, generation)
  press_on()
  local tombstone = BASE .. 'released:' .. attempt
  redis.call('SET', tombstone, math.max(generation, tonumber(redis.call('GET', tombstone) or '0')), 'PX', ARGV[4])
  redis.call('SET', BASE .. 'released', '1', 'PX', ARGV[4])
end

local function release_hold(slot, h, flags)
  tell('released', slot.key, h.fence, h.info)
  remove(slot, h.attempt)
  -- The clock was set back: a minimum hold lasts no longer from now on than it was to last from the start.
  local since = math.floor(h.since / 1000)
  local stays = math.min(h.stays, now + math.max(h.stays - since, 0))
  -- A revoked lock is wanted free: its minimum hold is not kept.
  if stays > now and not h.reason and (h.flags == 0 or has(flags, GUARDED)) and not has(flags, UNREPORTED) then
    h.flags, h.expires, h.ttl = LINGERING, stays, stays - now
    add(slot, h)
  end
end

-- Whether a fence, or the ticket of a queue entry, is older than what the release means: the caller may have used the attempt
-- again since.
local function meant(number, limit)
  return limit == 0 or tonumber(number or 0) <= limit
end

local function release(keys, attempt, flags, generation, limit)
  local gone, stays = 0, false
  if has(flags, UNANSWERED) then leave_tombstone(attempt, generation) end
  local packed = redis.call('HGET', CLIENT, attempt)
  if packed and meant(redis.call('ZSCORE', BASE .. 'queue:' .. keys[1], attempt .. client), limit) then
    local _, _, _, _, _, _, _, _, _, info = struct.unpack(ENTRY, packed)
    leave(keys, attempt, client, info)
    gone = 1
  end
  for _, key in ipairs(keys) do
    local slot = load(key)
    local h = find(slot, attempt)
    if h and not (has(flags, UNCONFIRMED) and h.flags == 0) and meant(h.fence, limit) then
      release_hold(slot, h, flags)
      gone = 1
    elseif h then
      stays = true
    end
  end
  -- Nothing is left of it for the poll of its process to find, also if its hold was over before.
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
