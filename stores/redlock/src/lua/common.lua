-- A lock at one node is two keys. L is the key that every Redlock client sets: its value is the holder's attempt.
-- V, the metadata beside it with the same expiry, is written by Lockkeeper clients: the version of the format, the attempt, the
-- number of the round, the fence (0 while it is not chosen), the start of the hold, the ttl in ms, and the holder as JSON.
-- If the attempt in V is not the value of L, V is left over from another holder. The reason of a revoked hold is stored before
-- the holder, with its length, so that a renewal reads it with V, and it expires with V.
-- A V of another version is ignored: the lock counts as another client's until it expires.
--
-- A script that changes one lock makes all its reads before its first write, and the node refuses its writes together: so
-- a script that ends in an error has written nothing. (A read fails for a key of another type; a write fails for a full
-- disk or memory, at a replica, with too few replicas. None of these begins or ends while a script runs.)

-- The version of V's format. Raise it when the value of V changes.
local VERSION = 'v2'

-- The tombstone of a released attempt of which a request may still arrive: the newest round that may have been sent. It expires
-- when no request can arrive any more.
local TOMBSTONE = 'lockkeeper:{all}:ended:'

-- The value of a key. A key of another type belongs to another program: it counts as a value that is not ours.
local function value_of(key)
  local value = redis.pcall('GET', key)
  if type(value) ~= 'table' then return value end
  if string.find(value.err, 'WRONGTYPE', 1, true) then return '' end
  error(value)
end

local function vote(key, attempt)
  local who, round, fence, since, ttl, info =
    string.match(value_of(key) or '', '^' .. VERSION .. ' (%x+) (%d+) (%d+) (%d+) (%d+) (.*)$')
  if who ~= attempt then return nil end
  local length, rest = string.match(info, '^!(%d+):(.*)$')
  local reason = length and string.sub(rest, 1, tonumber(length))
  if length then info = string.sub(rest, tonumber(length) + 1) end
  return { round = tonumber(round), fence = tonumber(fence), since = tonumber(since), ttl = tonumber(ttl), info = info,
    reason = reason }
end

local function reason_and_info(v)
  return v.reason and string.format('!%d:', #v.reason) .. v.reason .. v.info or v.info
end

local function text(attempt, v)
  return string.format('%s %s %.0f %.0f %.0f %.0f ', VERSION, attempt, v.round, v.fence, v.since, v.ttl) .. reason_and_info(v)
end

local function now_us()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

-- The counter has no expiry: if it expired with a lock, the next fence could be lower.
local function raise(counter, fence)
  if tonumber(redis.call('GET', counter) or '0') < fence then
    redis.call('SET', counter, string.format('%.0f', fence))
  end
end

-- Notifies waiters. Without the right to publish they poll; the release itself has happened.
local function publish(channel, fence)
  redis.pcall('PUBLISH', channel, string.format('%.0f', fence))
end

-- How long L lasts, in ms. Redis counts it by the wall clock: more than the ttl is left only if the clock was set back.
local function left(lock, v)
  local ms = redis.call('PTTL', lock)
  return v and ms > v.ttl and v.ttl or ms
end

-- The public view of L: a hash of the attempt, which is a secret, the remaining time, and the metadata.
local function seen(lock, key, value)
  local v = vote(key, value)
  local shown = v and string.format('%.0f %.0f ', v.fence, v.since) .. reason_and_info(v) or ''
  return { redis.sha1hex(value), left(lock, v), shown }
end
