-- A lock at one node is two keys. L is what every Redlock client sets: it holds the attempt of whoever has the lock here.
-- V, beside it and with the same end, is what we know of our own vote: the attempt, the number of the round, the fence
-- (0 while it is not chosen), since when, and who. A V whose attempt is not the value of L is somebody's leftover.
local function vote(key, attempt)
  local who, round, fence, since, info =
    string.match(redis.call('GET', key) or '', '^(%x+) (%d+) (%d+) (%d+) (.*)$')
  if who ~= attempt then return nil end
  return { round = tonumber(round), fence = tonumber(fence), since = tonumber(since), info = info }
end

local function text(attempt, v)
  return string.format('%s %.0f %.0f %.0f ', attempt, v.round, v.fence, v.since) .. v.info
end

local function now_us()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

-- The counter has no expiry: dying with a lock, it would let the fence go back.
local function raise(counter, fence)
  if tonumber(redis.call('GET', counter) or '0') < fence then
    redis.call('SET', counter, string.format('%.0f', fence))
  end
end

-- What others may see of L: which holder (not its attempt, which is a secret), for how long, and what V says.
local function seen(lock, key, value)
  local v = vote(key, value)
  local shown = v and string.format('%.0f %.0f ', v.fence, v.since) .. v.info or ''
  return { redis.sha1hex(value), redis.call('PTTL', lock), shown }
end
