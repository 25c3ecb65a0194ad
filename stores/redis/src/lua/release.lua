serve(slow)
flush()

local function release(keys, attempt)
  local gone = 0
  local packed = redis.call('HGET', CLIENT, attempt)
  if packed then
    local _, _, _, _, _, _, _, _, _, _, info = struct.unpack(ASK, packed)
    leave(keys, attempt, client, info)
    gone = 1
  end
  for _, key in ipairs(keys) do
    local slot = load(key)
    local h, i = hold_of(slot, attempt)
    if h then
      tell('released', key, h.fence, h.info)
      if h.stays > now and h.flags == 0 then
        h.attempt, h.owner, h.flags, h.expires, h.ttl = NONE, NONE, LINGERING, h.stays, h.stays - now
      else
        table.remove(slot.holds, i)
      end
      slot.dirty, gone = true, 1
    end
  end
  if gone == 1 then serve({ unpack(keys) }) end
  flush()
  return gone
end

for _, one in ipairs(rest) do
  local attempt, i, first, count = unpack(one)
  answers[i] = release(names_at(first, count), attempt)
end
return answers
