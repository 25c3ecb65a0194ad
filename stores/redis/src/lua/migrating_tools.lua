
-- Watchers are told if the key that names their channel is on this node.
local found = redis.pcall('GET', BASE .. 'watched')
watched = type(found) == 'string' and found

-- The first write of these scripts: it needs no memory, so a full server does not refuse it. It never shortens a life.
local function prolong(key, ms)
  local left = redis.call('PTTL', key)
  if left ~= -1 then redis.call('PEXPIRE', key, math.max(left, ms)) end
end

-- What `release.lua` says about a hold: whether it is one that this release means.
local function is_meant(h)
  return not (math.floor(FLAGS / 8) % 2 == 1 and h.flags == 0) and (LIMIT == 0 or h.fence <= LIMIT)
end
