local answers, at = {}, 5
for i = 3, #ARGV, 2 do
  local attempt, count = ARGV[i], tonumber(ARGV[i + 1])
  local good = true
  for k = at, at + count - 1 do good = good and hold_of(load(KEYS[k]), attempt) ~= nil end
  for k = at, at + count - 1 do
    local slot = load(KEYS[k])
    local h = hold_of(slot, attempt)
    if good then h.expires, h.flags, slot.dirty = now + h.ttl, 0, true end
  end
  at = at + count
  answers[#answers + 1] = good and 1 or 0
end
flush()
return answers
