for _, one in ipairs(rest) do
  local nth, attempt, at, count = unpack(one)
  local good, reason = true, nil
  for k = at, at + count - 1 do
    -- A hold that another version has written since cannot be renewed by this one: it is lost.
    local understood, h = guarded(find, load(KEYS[k]), attempt)
    h = understood and h or nil
    good, reason = good and h ~= nil, reason or h and h.reason
  end
  for k = at, at + count - 1 do
    if good and not reason then renew(load(KEYS[k]), find(load(KEYS[k]), attempt), client) end
  end
  answers[nth] = good and (reason or 1) or 0
end
flush()
return answers
