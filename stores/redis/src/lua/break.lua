local key, reason = KEYS[5], ARGV[3]
local slot, touched = load(key), { key }
-- It is not ours to delete.
if slot.odd then return redis.error_reply('WRONGTYPE It is no lock') end
press_on()
local fence = next_fence(tonumber(ARGV[4]))
local held = slot.holds
slot.holds, slot.dirty, slot.foreign = {}, true, false

local function hold_back(where, h)
  where.holds[#where.holds + 1] = { attempt = NONE, owner = NONE, fence = h.fence, expires = now + h.delay,
    since = h.since, stays = 0, ttl = h.delay, delay = 0, mode = 0, flags = DELAY, names = '', info = '' }
end

for _, h in ipairs(held) do
  if h.flags == 0 and h.delay > 0 then hold_back(slot, h) end
  -- A grant of several names is lost as a whole.
  for _, other in ipairs(h.flags <= PENDING and split(h.names) or {}) do
    local also = load(other)
    local mine, i = hold_of(also, h.attempt)
    if mine then
      table.remove(also.holds, i)
      also.dirty = true
      if mine.flags == 0 and mine.delay > 0 then hold_back(also, mine) end
      touched[#touched + 1] = other
    end
  end
end
for _, one in ipairs(touched) do tell('broken', one, fence, reason) end
serve(touched)
flush()
return fence
