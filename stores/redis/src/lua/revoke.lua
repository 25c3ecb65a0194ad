local key, reason, only = KEYS[4], ARGV[3], ARGV[5]
local slot, touched, found, seen = load(key), { key }, {}, {}
if slot.not_a_lock then return redis.error_reply('WRONGTYPE It is no lock') end
-- Another lock client holds the lock: it would not learn of the revoke.
if slot.foreign then
  flush()
  return { 0 }
end
press_on()
local fence = next_fence(tonumber(ARGV[4]))

local function mark(where, h)
  h.reason, where.changed[h.attempt] = reason, true
end

for _, id in ipairs(only == '' and ids_of(slot) or { only }) do
  local h = find(slot, id)
  if h and h.flags > PENDING then
    remove(slot, id)
  elseif h then
    mark(slot, h)
    found[#found + 1] = pack_hold(h)
  end
  -- A grant of several names is revoked as a whole.
  for _, other in ipairs(h and split(h.names) or {}) do
    local mine = other ~= key and find(load(other), id)
    if mine then
      if not seen[other] then touched[#touched + 1] = other end
      seen[other] = true
      if mine.flags > PENDING then remove(load(other), id) else mark(load(other), mine) end
    end
  end
end
for _, one in ipairs(touched) do emit('revoked', one, fence, reason) end
serve(touched)
flush()
-- Returns the holds as they are stored: the part of a grant in this slot lists the names in other slots, which the caller revokes there.
return { 1, fence, found }
