
-- The hash of the holds. Replies: 0 if the attempt does not hold here, 1 if it does or the step is done, 2 if there is no hash;
-- the time to live of the lock key; the changes of the sorted set (an id, and how long its hold lasts from now on, or '' to remove it); of a break also which other lock keys its holds had, each behind its attempt; of a revoke the revoked holds; and
-- 3 and the reason to a renewal of a revoked hold.
local slot = new_slot(string.sub(KEYS[1], #BASE + 7))
slot.stored = true
local packed = redis.call('HGET', slot.holds, '#')
if not packed then return { 2, 0, {}, {} } end
read_counts(slot, packed)

local function holds(h) return h and math.min(h.expires, now + h.ttl) > now end

-- Removes a hold; its lock-delay follows.
local function take_away(h)
  remove(slot, h.attempt)
  if h.delay > 0 then hold_back(slot, h, now + h.delay) end
end

local answer, lives, others = 0, 0, {}
local h = STEP ~= 'break' and find(slot, ATTEMPT)
if STEP == 'look' then
  if not holds(h) then return { 0, 0, {}, {} } end
  return { 1, h.ttl + math.max(h.delay, slot.slack), { ATTEMPT, tostring(h.ttl) }, {} }
elseif STEP == 'renew' then
  -- A revoked hold is not renewed.
  if holds(h) and h.reason then return { 3, 0, {}, { h.reason } } end
  if not holds(h) then return { 0, 0, {}, {} } end
  h.expires, h.flags, slot.changed[ATTEMPT] = now + h.ttl, 0, true
  answer, lives = 1, h.ttl + h.delay
elseif STEP == 'release' then
  local lingers = find(slot, '~' .. ATTEMPT)
  if h and applies_to(h) then
    answer = holds(h) and 1 or 0
    emit('released', slot.key, h.fence, h.info)
    remove(slot, ATTEMPT)
    -- As in `release.lua`: the minimum hold applies only if a guard existed.
    local guarded = h.flags == 0 or FLAGS % 2 == 1
    local stays = math.min(h.stays, now + math.max(h.stays - math.floor(h.since / 1000), 0))
    if stays > now and not h.reason and guarded and math.floor(FLAGS / 2) % 2 == 0 then
      h.flags, h.expires, h.ttl = LINGERING, stays, stays - now
      add(slot, h)
    end
  elseif lingers and lingers.flags == LINGERING then
    -- An earlier release had no reply: the other keys may still need the same change.
    slot.changed['~' .. ATTEMPT], slot.changed[ATTEMPT] = true, true
  elseif not h then
    slot.changed[ATTEMPT] = true
  end
elseif STEP == 'take' then
  if h then take_away(h) end
  answer = h and 1 or 0
  slot.changed['~' .. ATTEMPT], slot.changed[ATTEMPT] = true, true
elseif STEP == 'revoke' then
  -- The holds of one attempt, or all of them.
  for _, id in ipairs(ATTEMPT ~= '' and { ATTEMPT } or redis.call('HKEYS', slot.holds)) do
    local one = (#id == 32 or string.sub(id, 1, 1) == '~') and find(slot, id)
    if one and one.flags > PENDING then
      remove(slot, id)
    elseif one then
      answer, one.reason, slot.changed[id] = 1, REASON, true
      others[#others + 1] = pack_hold(one)
    end
  end
  emit('revoked', slot.key, TIME_MS, REASON)
elseif STEP == 'break' then
  answer = 1
  for _, id in ipairs(redis.call('HKEYS', slot.holds)) do
    -- The ids of holds are attempts, or attempts with a sign before them; the other fields are indexes.
    local one = (#id == 32 or string.sub(id, 1, 1) == '~') and find(slot, id)
    if one and one.flags > PENDING then
      remove(slot, id)
    elseif one then
      for _, other in ipairs(split(one.names)) do
        if other ~= slot.key then others[#others + 1], others[#others + 2] = one.attempt, other end
      end
      take_away(one)
    end
  end
  emit('broken', slot.key, TIME_MS, ATTEMPT)
end

local ends, sets = {}, {}
local dels = {}
for id in pairs(slot.changed) do
  local one = find(slot, id)
  ends[#ends + 1], ends[#ends + 2] = id, one and tostring(one.expires - now) or ''
  if one then
    sets[#sets + 1], sets[#sets + 2] = id, pack_hold(one)
    lives = math.max(lives, one.expires - now)
  else
    dels[#dels + 1] = id
  end
end
for field in pairs(slot.changed_fields) do
  if slot.fields[field] then
    sets[#sets + 1], sets[#sets + 2] = field, slot.fields[field]
  else
    dels[#dels + 1] = field
  end
end
sets[#sets + 1], sets[#sets + 2] = '#', pack_counts(slot)
prolong(slot.holds, 2 * lives)
call_all('HSET', slot.holds, sets)
call_all('HDEL', slot.holds, dels)
publish()
return { answer, lives, ends, others }
