local key, reason = KEYS[4], ARGV[3]
local slot, touched = load(key), { key }
-- Another program keeps the key.
if slot.not_a_lock then return redis.error_reply('WRONGTYPE It is no lock') end
press_on()
local fence = next_fence(tonumber(ARGV[4]))
slot.dirty, slot.foreign = true, false

-- A waiter may have started its work before it confirmed its hand-off: its lock-delay counts too.
local function take_away(where, h)
  remove(where, h.attempt)
  if h.delay > 0 then hold_back(where, h, now + h.delay) end
end

for _, id in ipairs(ids_of(slot)) do
  local h = find(slot, id)
  if h and h.flags > PENDING then
    remove(slot, id)
  elseif h then
    take_away(slot, h)
    -- A grant of several names is lost as a whole.
    for _, other in ipairs(split(h.names)) do
      local mine = other ~= key and find(load(other), h.attempt)
      if mine then
        take_away(load(other), mine)
        touched[#touched + 1] = other
      end
    end
  end
end
for _, one in ipairs(touched) do emit('broken', one, fence, reason) end
serve(touched)
flush()
return fence
