
-- The script publishes events if this node has the key that names their channel.
local found = redis.pcall('GET', BASE .. 'watched')
watched = type(found) == 'string' and found

-- Extends the life of a key, and never shortens it. It is the first write of these scripts, and needs no memory, so a full server does
-- not reject it. A key in its last millisecond gets one more: else `PEXPIRE` would delete it, and the next write make it anew, for ever.
local function prolong(key, ms)
  local left = redis.call('PTTL', key)
  if left ~= -1 then redis.call('PEXPIRE', key, math.max(left, ms, 1)) end
end

-- Whether the release applies to a hold, as in `release.lua`.
local function applies_to(h)
  return not (math.floor(FLAGS / 8) % 2 == 1 and h.flags == 0) and (LIMIT == 0 or h.fence <= LIMIT)
end
